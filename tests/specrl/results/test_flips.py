"""How far rounding lets texts differ from plain decoding's, over control steps, and in words."""

import pytest

from specrl.results.speedup import Flips, flips

STEPS = [
    {"spec/control_mismatches": 0, "spec/compared_tokens": 400},
    {"reward": 1.0},
    {"spec/control_mismatches": 1, "spec/compared_tokens": 350, "spec/flip_position": 40.0},
    {"spec/control_mismatches": 3, "spec/compared_tokens": 250, "spec/flip_position": 20.0},
]


def test_flips_by_hand():
    assert flips(STEPS) == Flips(4, 1000, (40 + 3 * 20) / 4)
    assert flips(STEPS[:1]) == Flips(0, 400, 0.0)
    assert flips(STEPS[1:2]) is None, "no control step"


@pytest.mark.parametrize(
    ("found", "dtype", "told"),
    [
        (Flips(0, 12345, 0.0), "bfloat16", "none of 12,345 tokens differs from plain decoding's"),
        (Flips(4, 1000, 25.0), "bfloat16", "in bfloat16 4 of 1,000 tokens come out otherwise than in plain decoding"),
        (Flips(4, 1000, 25.0), "", "4 of 1,000 tokens come out otherwise than in plain decoding (4 rows, after 25"),
        (Flips(1, 30000, 2.0), "", "0.033 of 1,000 tokens come out otherwise than in plain decoding (1 row, after 2"),
    ],
)
def test_flips_in_words(found, dtype, told):
    assert found.told(dtype).startswith(told)
    assert found.told(dtype).endswith("of the same engine. The law is unchanged") == bool(found.count)
