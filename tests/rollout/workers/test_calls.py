"""Timeouts of calls to a worker, with a clock that the test sets, and the stats of several workers."""

import time

import pytest

from specrl.rollout.types import EngineStats, Request
from specrl.rollout.workers.calls import LAST_PASS_S, WorkerHandle, merge_stats


class Actor:
    """Records its calls."""

    def __init__(self):
        self.called: list[str] = []

    def __getattr__(self, name):
        return Method(self.called, name)


class Method:
    def __init__(self, called, name):
        self.called, self.name = called, name

    def options(self, **_):
        return self

    def remote(self, *args):
        self.called.append(self.name)


@pytest.mark.parametrize(
    ("timeout", "stopped", "deadline"),
    [
        (1800, 300, 1800),  # it has hung since second 1, for example
        (1800, 1790, 1790 + LAST_PASS_S),
        (1800, 4000, 4000 + LAST_PASS_S),  # a long update of the trainer, during which the worker kept working
        (6, 4, 10),
    ],
)
def test_a_worker_that_is_stopped_keeps_the_deadline_it_began_with(monkeypatch, timeout, stopped, deadline):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    worker = WorkerHandle(0, Actor())
    worker.work_ahead(timeout, 3, [Request([1], 7, 9)])
    assert worker.deadline == timeout
    now[0] = stopped
    for _ in range(2):
        worker.halt(timeout)
        assert worker.deadline == deadline
        now[0] += 20
    assert worker.actor.called == ["run", "halt"], "it is told once"


def test_seconds_are_the_slowest_workers_and_counts_everyones():
    slow = EngineStats(passes=3, forward_tokens=5, decode_s=4.0)
    quick = EngineStats(passes=7, forward_tokens=9, decode_s=1.0, prefill_s=2.0)
    merged = merge_stats([slow, quick])
    assert (merged.passes, merged.forward_tokens) == (10, 14)
    assert (merged.decode_s, merged.prefill_s) == (4.0, 0.0), "they work in parallel"
