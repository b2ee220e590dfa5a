"""Calls to workers, from submission to their end: a result, an error, death or a missed deadline."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from specrl.rollout.sections import ClusterConfig
from specrl.rollout.types import EngineStats, Request, RolloutError
from specrl.rollout.workers.worker import RolloutWorker, WorkerInfo

LOADING_S = 300.0
"""Least time that a worker has to load the model or weights."""
LAST_PASS_S = 60.0
"""Least time that a worker has to end its pass after the stop signal."""
_CONTROL = "control"  # the concurrency group of calls that are answered during the one in progress
_numbers = itertools.count(1)


def loading_s(cluster: ClusterConfig) -> float:
    """Seconds that a worker has to load the model or weights."""
    return max(cluster.task_timeout_s, LOADING_S)


@dataclass(slots=True)
class Task:
    """A call that any worker may answer."""

    method: str
    args: tuple
    rows: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Lost:
    """What became of a call whose worker died or missed its deadline."""

    reason: str


@dataclass(slots=True)
class WorkerHandle:
    """One worker of the pool: the actor that currently runs it, and what the actor is doing."""

    index: int
    actor: Any = None
    info: WorkerInfo | None = None
    """None until it has started."""
    call: ray.ObjectRef | None = None
    """The call in progress, None when idle."""
    method: str = ""
    """Of the last call."""
    task: Task | None = None
    """The task of `call`; None while it starts, takes weights or works ahead."""
    ahead: Sequence[Request] = ()
    """The rows of `call` where it works ahead."""
    ahead_call: int = 0
    """Number of the last call that works ahead."""
    halted: bool = False
    """That call got the stop signal."""
    deadline: float = 0.0

    def __str__(self) -> str:
        return f"worker {self.index}" + (f" (pid {self.info.pid})" if self.info else "")

    def start(self, cluster: ClusterConfig, *args: Any) -> None:
        """A new actor, which calls `start`."""
        options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {_CONTROL: 1}}
        options |= {"num_cpus": cluster.cpus_per_worker, "num_gpus": cluster.gpus_per_worker}
        self.actor = ray.remote(**options)(RolloutWorker).remote(self.index)
        self.info = None
        self.submit(loading_s(cluster), "start", *args)

    def submit(self, timeout_s: float, method: str, *args: Any, task: Task | None = None) -> None:
        """Calls a method of the worker."""
        self.call = self.actor.run.remote(method, *args)
        self.method = method
        self.task = task
        self.ahead = ()
        self.deadline = time.monotonic() + timeout_s

    def work_ahead(self, timeout_s: float, version: int, requests: Sequence[Request]) -> None:
        """Rolls out rows until `halt`."""
        self.ahead_call = next(_numbers)
        self.halted = False
        self.submit(timeout_s, "ahead", version, self.ahead_call, requests)
        self.ahead = requests

    def halt(self, timeout_s: float) -> None:
        """Ends the rollout ahead.

        Its deadline is still that of the call, which began when the worker was given the rows: a hanging worker does
        not get more time. Nobody checks deadlines while the trainer computes, so a worker that is past its own still
        gets time to end its pass, at most `LAST_PASS_S`.
        """
        if self.ahead and not self.halted:
            self.actor.halt.options(concurrency_group=_CONTROL).remote(self.ahead_call)
            self.halted = True
            self.deadline = max(self.deadline, time.monotonic() + min(timeout_s, LAST_PASS_S))

    def ended(self) -> None:
        """Its call is over."""
        self.call = None
        self.task = None
        self.ahead = ()


def wait_first(workers: Sequence[WorkerHandle], cluster: ClusterConfig) -> tuple[WorkerHandle, Any | Lost]:
    """The first call to end, and its result unless its worker is lost.

    Raises:
        RolloutError: the call raised, or a worker did not start in time.
    """
    busy = {worker.call: worker for worker in workers if worker.call}
    due = min(busy.values(), key=lambda worker: worker.deadline)
    ended, _ = ray.wait(list(busy), timeout=max(0.0, due.deadline - time.monotonic()))
    if ended:
        worker = busy[ended[0]]
        try:
            return worker, ray.get(ended[0])
        except RayTaskError as error:
            raise RolloutError(f"{worker} failed in {worker.method}: {error.cause}") from None
        except RayError as error:
            # Ray's reason in one line, without its list of common causes
            reason = str(error).strip().splitlines()[-1].partition(" Some common causes")[0]
            return worker, Lost(f"died: {reason}")
    if due.info is None:
        free = ray.available_resources()
        raise RolloutError(
            f"worker {due.index} did not start within {loading_s(cluster):g} s; it "
            f"needs {cluster.cpus_per_worker:g} CPUs and {cluster.gpus_per_worker:g} GPUs, and the cluster has "
            f"{free.get('CPU', 0):g} and {free.get('GPU', 0):g} free. Ask for less if that is too few, else wait "
            "longer, with a higher cluster.task_timeout_s: its model is loading"
        )
    return due, Lost("did not answer before its deadline (cluster.task_timeout_s)")


def call_each(workers: Sequence[WorkerHandle], cluster: ClusterConfig, method: str, args: Sequence[tuple]) -> None:
    """Calls a method of each idle worker with its own arguments, and waits for all. No worker is replaced, as each
    needs the others to finish.

    Raises:
        RolloutError: one fails, dies or misses its deadline.
    """
    for worker, arguments in zip(workers, args, strict=True):
        worker.submit(loading_s(cluster), method, *arguments)
    while any(worker.call for worker in workers):
        worker, outcome = wait_first(workers, cluster)
        worker.ended()
        if isinstance(outcome, Lost):
            raise RolloutError(f"{worker} {outcome.reason} in {method} of an update of the weights")


def merge_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Counts of all workers; seconds of the slowest, as they work in parallel."""
    names = [f.name for f in fields(EngineStats) if f.name.endswith("_s")]
    slowest = max(stats, key=lambda each: sum(getattr(each, name) for name in names))
    return replace(sum(stats, EngineStats()), **{name: getattr(slowest, name) for name in names})
