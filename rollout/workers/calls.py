"""Calls to workers, from submission to their end in whatever way."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import ray
from ray.exceptions import RayError

from specrl.rollout.sections import ClusterConfig
from specrl.rollout.types import EngineStats, Request, RolloutError
from specrl.rollout.workers.worker import Failure, RolloutWorker, Share, Started

LAST_PASS_S = 60.0
"""That a worker which is told to stop has at least to end its pass."""
_BELL = "bell"  # the group of calls that are answered beside the one in progress
_numbers = itertools.count(1)


@dataclass(slots=True)
class Task:
    """A call that any worker may answer."""

    method: str
    args: tuple
    share: Share = field(default_factory=list)
    splits: int = 0


@dataclass(slots=True)
class Place:
    """A place in the pool, and the actor that holds it now."""

    index: int
    actor: Any = None
    started: Started | None = None
    call: ray.ObjectRef | None = None
    """What it is busy with, None when idle."""
    task: Task | None = None
    """The task of `call`; None while it starts, takes weights or works ahead."""
    ahead: Sequence[Request] = ()
    """The rows of `call` where it works ahead."""
    number: int = 0
    """Of that call."""
    halted: bool = False
    """It was told to end it."""
    deadline: float = 0.0

    def __str__(self) -> str:
        return f"worker {self.index}" + (f" (pid {self.started.pid})" if self.started else "")

    def start(self, cluster: ClusterConfig, *args: Any) -> None:
        """A new actor, which calls `start`."""
        limits = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {_BELL: 1}}
        actor = ray.remote(num_cpus=cluster.cpus_per_worker, num_gpus=cluster.gpus_per_worker, **limits)(RolloutWorker)
        self.actor, self.started = actor.remote(self.index), None
        self.submit(cluster.start_timeout_s, "start", *args)

    def submit(self, timeout_s: float, method: str, *args: Any, task: Task | None = None) -> None:
        """Calls a method of the worker."""
        self.call, self.task, self.ahead = self.actor.run.remote(method, *args), task, ()
        self.deadline = time.monotonic() + timeout_s

    def work_ahead(self, timeout_s: float, version: int, requests: Sequence[Request]) -> None:
        """Lets it roll out rows until `halt`."""
        self.number, self.halted = next(_numbers), False
        self.submit(timeout_s, "ahead", version, self.number, requests)
        self.ahead = requests

    def halt(self, timeout_s: float) -> None:
        """Ends what it rolls out ahead.

        Its deadline stays that of the call, which began when the worker was given the rows: one that hangs is not
        waited for anew. Nobody looks at deadlines while the trainer computes, so a worker that has gone on past its own
        still gets to end its pass, for `LAST_PASS_S` at most.
        """
        if self.ahead and not self.halted:
            self.actor.halt.options(concurrency_group=_BELL).remote(self.number)
            self.halted = True
            self.deadline = max(self.deadline, time.monotonic() + min(timeout_s, LAST_PASS_S))

    def ended(self) -> None:
        """Its call is over."""
        self.call, self.task, self.ahead = None, None, ()


def first_to_end(places: Sequence[Place], cluster: ClusterConfig) -> tuple[Place, Any | Failure]:
    """The first call to end, in whatever way: a result, a Failure, death (`lost`) or the deadline (`lost`).

    Raises:
        RolloutError: a worker did not start in time.
    """
    busy = {place.call: place for place in places if place.call}
    due = min(busy.values(), key=lambda place: place.deadline)
    ended, _ = ray.wait(list(busy), timeout=max(0.0, due.deadline - time.monotonic()))
    if ended:
        try:
            return busy[ended[0]], ray.get(ended[0])
        except RayError as error:
            return busy[ended[0]], Failure("lost", _died(error))
    if due.started is None:
        free = ray.available_resources()
        raise RolloutError(
            f"worker {due.index} did not start within cluster.start_timeout_s={cluster.start_timeout_s:g}; it "
            f"needs {cluster.cpus_per_worker:g} CPUs and {cluster.gpus_per_worker:g} GPUs, and the cluster has "
            f"{free.get('CPU', 0):g} and {free.get('GPU', 0):g} free. Ask for less if that is too few, else wait "
            "longer: its model is loading"
        )
    return due, Failure("lost", "did not answer before its deadline (cluster.task_timeout_s, start_timeout_s)")


def ask_each(places: Sequence[Place], cluster: ClusterConfig, method: str, args: Sequence[tuple]) -> None:
    """Calls a method of idle workers, each with arguments of its own, and waits for all. Nobody is replaced: what
    they do, they do together.

    Raises:
        RolloutError: one fails, dies or misses `cluster.start_timeout_s`.
    """
    for place, own in zip(places, args, strict=True):
        place.submit(cluster.start_timeout_s, method, *own)
    while any(place.call for place in places):
        place, outcome = first_to_end(places, cluster)
        place.ended()
        if isinstance(outcome, Failure):
            raise RolloutError(f"{place} failed in {method} of an update of the weights: {outcome}")


def together(costs: Sequence[EngineStats]) -> EngineStats:
    """Counts of all workers; seconds of the slowest, as they work side by side."""
    seconds = [f.name for f in fields(EngineStats) if f.name.endswith("_s")]
    slowest = max(costs, key=lambda cost: sum(getattr(cost, name) for name in seconds))
    return replace(sum(costs, EngineStats()), **{name: getattr(slowest, name) for name in seconds})


def _died(error: RayError) -> str:
    """Ray's reason in one line, without its list of common causes."""
    return "died: " + str(error).strip().splitlines()[-1].partition(" Some common causes")[0]
