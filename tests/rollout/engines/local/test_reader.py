"""What a reader says of each row: the same at every row's end as behind all of its tokens."""

import pytest
import torch

from rollout.engines.base import Sampling
from rollout.engines.local.packed import packed_model
from rollout.engines.local.reader import Reader
from rollout.types import Request

FEED = {0: [5], 1: [6, 7, 8], 2: [9, 10]}


def test_draws_behind_the_ends_are_those_behind_all_tokens(build_model):
    model = packed_model(build_model("llama"), Sampling(frozenset()))
    requests = [Request([2] * (3 + i), 70 + i, 20) for i in FEED]
    found = []
    with model.inference():
        for ends in (False, True):
            reader = Reader(model, requests)
            reader.admit({row: [4, tokens[0]] for row, tokens in FEED.items()})
            found.append(reader.read(FEED, ends=ends))
    every, last = found
    assert [*every] == [*last] == [*FEED]
    for row, tokens in FEED.items():
        assert (every[row].at, len(every[row].draws)) == (2, len(tokens)), "two tokens are held"
        assert last[row].at == 2 + len(tokens) - 1
        assert last[row].draws == every[row].draws[-1:]
        assert last[row].logprobs == pytest.approx(every[row].logprobs[-1:], rel=1e-5)
        torch.testing.assert_close(last[row].hidden, every[row].hidden[-1:])
        assert last[row].usable
