"""A reader's output for a row is the same at its last token as in a pass over all of its tokens."""

import pytest
import torch

from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.probe import packed_model
from specrl.rollout.engines.local.reader import Reader
from specrl.rollout.types import Request

FEED = {0: [5], 1: [6, 7, 8], 2: [9, 10]}


def test_draws_behind_the_ends_are_those_behind_all_tokens(build_model):
    model = packed_model(build_model("llama"), SamplingParams(frozenset()))
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
        assert (every[row].position, len(every[row].tokens)) == (2, len(tokens)), "two tokens are held"
        assert last[row].position == 2 + len(tokens) - 1
        assert last[row].tokens == every[row].tokens[-1:]
        assert last[row].logprobs == pytest.approx(every[row].logprobs[-1:], rel=1e-5)
        torch.testing.assert_close(last[row].hidden, every[row].hidden[-1:])
        assert last[row].usable


def test_a_reader_that_is_lent_states_has_the_slabs_of_the_lender(build_model):
    """The states of a row are looked up by its slab, for any rows in any order."""
    model = packed_model(build_model("llama"), SamplingParams(frozenset()))
    requests = [Request([2] * (3 + i), 70 + i, 20) for i in range(8)]

    def slabs(reader, rows):
        return [reader.slab(row) for row in rows]

    with model.inference():
        lender = Reader(model, requests, 4, states=True)
        lent = Reader(model, requests, 4, states=lender)
        alone = Reader(model, requests, 4)
        for reader, rows in ((lender, (0, 1, 2, 3)), (lent, (3, 1, 0, 2)), (alone, (3, 1, 0, 2))):
            reader.admit({row: [] for row in rows})
        assert slabs(lent, range(4)) == slabs(lender, range(4)) == [0, 1, 2, 3] != slabs(alone, range(4)), "control"
        for reader in (lender, lent):
            reader.leave([0, 2])
            reader.admit({row: [] for row in ((5, 4) if reader is lent else (4, 5))})
            assert slabs(lent, (1, 3)) == slabs(lender, (1, 3))
        assert slabs(lent, (4, 5)) == slabs(lender, (4, 5))
        for reader in (lender, lent):
            reader.read({row: [9] for row in sorted((1, 3, 4, 5), key=reader.slab)})
            reader.rollback(5, 0)
        for reader in (lender, lent):
            reader.leave([1, 3], compact=True)  # the others move together
        assert slabs(lent, (4, 5)) == slabs(lender, (4, 5)) == [0, 1]
        assert lent.read({4: [9], 5: [9]})[4].tokens == lender.read({4: [9], 5: [9]})[4].tokens
