"""Rollouts that make a pass each in turn: their order, their clocks, and what becomes of the others when one fails."""

import time
from types import SimpleNamespace

import pytest

from benchmarks.interleaved import interleaved
from specrl.rollout.drafting.budget import Budget


@pytest.fixture
def rollout(monkeypatch):
    """make(name, seconds): passes of so many seconds each, by a clock that only passes advance; returns its seconds."""
    clock, passes = SimpleNamespace(now=0.0), []

    def observe_pass(name, tokens, seconds):
        clock.now += seconds
        passes.append(name)

    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(Budget, "observe_pass", observe_pass)

    def make(name, *seconds):
        def run():
            began = time.perf_counter()
            for each in seconds:
                Budget.observe_pass(name, 1, each)
            return time.perf_counter() - began

        return run

    return SimpleNamespace(make=make, passes=passes)


def test_they_make_a_pass_each_in_turn_and_none_is_charged_with_the_others(rollout):
    first, second = rollout.make("plain", 1, 1, 1, 2), rollout.make("drafts", 10, 30)
    assert interleaved(first, second) == [5, 40]
    assert rollout.passes == ["plain", "drafts", "plain", "drafts", "plain", "plain"]
    assert [first(), time.perf_counter()] == [5, 50], "everything is put back"


def test_one_that_fails_does_not_stop_the_others(rollout):
    def failing():
        Budget.observe_pass("failing", 1, 1)
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        interleaved(failing, rollout.make("plain", 1, 1, 1))
    assert rollout.passes.count("plain") == 3
