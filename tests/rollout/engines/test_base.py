"""Garbage collection while engines work."""

import gc

import pytest

from specrl.rollout import verify
from specrl.rollout.engines.base import gc_frozen
from tests.engines import local
from tests.rollout.golden import SAMPLING, requests_of


@pytest.fixture(autouse=True)
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_is_there_is_left_alone_and_given_back():
    with gc_frozen():
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0
    with pytest.raises(KeyError), gc_frozen():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_what_somebody_froze_stays_frozen_and_nothing_else_is():
    gc.freeze()
    theirs = gc.get_freeze_count()
    mine = [[] for _ in range(20_000)]
    with gc_frozen():
        assert abs(gc.get_freeze_count() - theirs) < 10_000  # some of them are freed during the work
    assert abs(gc.get_freeze_count() - theirs) < 10_000
    assert len(mine) == 20_000


def test_an_engine_works_with_the_heap_at_rest(golden, monkeypatch):
    model, cases, _ = golden("llama")
    frozen, accepted = [], verify.accept_exact

    def accept(*of):
        if not frozen:  # counting them is slow
            frozen.append(gc.get_freeze_count())
        return accepted(*of)

    monkeypatch.setattr(verify, "accept_exact", accept)
    local(model, SAMPLING).generate(requests_of(cases))
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() == 0
