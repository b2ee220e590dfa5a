"""A response under construction, and the accepted tokens that it records."""

import pytest

from specrl.rollout.engines.response import Response
from specrl.rollout.types import Request
from specrl.rollout.verify import Accepted

EOS = 1


@pytest.mark.parametrize(
    ("tokens", "drafted", "cap", "kept", "reused"),
    [
        ([5, 6, 7], 2, 9, 3, [True, True, False]),
        ([5, 6, 7], 0, 9, 3, [False] * 3),
        ([5, EOS, 7, 8], 3, 9, 2, [True, True]),  # the draft continued after its end
        ([5, 6, EOS], 2, 9, 3, [True, True, False]),
        ([5, 6, 7, 8], 3, 2, 2, [True, True]),
    ],
)
def test_columns_have_one_length(tokens, drafted, cap, kept, reused):
    row, numbers = Response(Request([2], 0, cap)), [float(i) for i in range(len(tokens))]
    assert row.emit(Accepted(tokens, numbers, numbers, drafted), {EOS}) == kept
    assert (row.tokens, row.logprobs, row.behaviour) == (tokens[:kept], numbers[:kept], numbers[:kept])
    assert row.reused == reused
