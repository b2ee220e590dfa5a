"""Rollout workers on Ray: an Engine whose rows are decoded by actors, each with an engine of its own.

The noise of a rollout belongs to its rows, so a row is the same wherever it is decoded: work can be split, moved and
repeated without changing a token. Ray itself restarts and retries nothing, as an actor that it restarted would have the
weights of the model's files. The pool does, as it knows the weights, their version and their probe.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from torch import Tensor

from specrl.rollout.build import build_engine
from specrl.rollout.engines.base import NO_WEIGHTS, Engine, EngineSpec, Probe
from specrl.rollout.engines.filling import JOINING
from specrl.rollout.sections import ClusterConfig
from specrl.rollout.types import AheadText, Completion, EngineStats, Request, RolloutError
from specrl.rollout.workers.ahead import Ahead
from specrl.rollout.workers.calls import Lost, Task, WorkerHandle, call_each, loading_s, merge_stats, wait_first
from specrl.rollout.workers.delivery import Delivery
from specrl.rollout.workers.worker import WorkerInfo, gpu_uuid, split_work

logger = logging.getLogger(__name__)

MOST_LOSSES = 3
"""Workers that may be lost without a finished call between them; one more stops the run."""


class RolloutPool:
    """An Engine made of `cluster.num_workers` Ray actors; needs a connected Ray (specrl.run.cluster.connect).

    Workers that die or hang are replaced, and get the current weights before they serve; their calls are repeated. What
    an engine raises is a RolloutError, after which the pool is closed.

    It works ahead (WorksAhead): workers without a row of the current batch begin those of the next one, until the pool
    is called again, and the others take some into their passes (FillsPasses). One that dies or hangs then costs drafts,
    and counts as any other.

    Args:
        spec: what each worker builds.
        cluster: number of workers, their size and deadlines.
        build: makes a worker's engine.

    Raises:
        RolloutError: a worker could not start.
    """

    own_weights = True

    def __init__(self, spec: EngineSpec, cluster: ClusterConfig, build: Callable[[EngineSpec], Engine] = build_engine):
        self.spec = spec
        self.cluster = cluster
        self.weight_version = 0
        self.replaced = 0
        """Workers replaced so far."""
        self._build = build
        self._probe: Probe | None = None
        self._losses: list[str] = []  # of workers, since a task was last finished
        self._workers = [WorkerHandle(i) for i in range(cluster.num_workers)]
        call = partial(call_each, self._workers, cluster)
        self._delivery = Delivery(ray.put, call, ray.util.get_node_ip_address())
        self._ahead = Ahead()
        with self._closed_on_error():
            for worker in self._workers:
                self._start(worker)
            self._wait_idle()
        trainer = gpu_uuid()
        shared = bool(trainer) and any(info.gpu == trainer for info in self._infos)
        self.not_ahead = "a rollout worker shares the trainer's GPU" if shared else ""

    @property
    def _infos(self) -> list[WorkerInfo]:
        """Of all workers, each of which has started."""
        return [worker.info for worker in self._workers if worker.info]

    @property
    def how_ahead(self) -> str:
        """See WorksAhead."""
        fill = min(info.fill for info in self._infos)
        return "idle workers begin the next batch" + (f", and {JOINING.format(fill)}" if fill else "")

    def generate(self, requests: Sequence[Request]) -> tuple[list[Completion], EngineStats]:
        """See Engine.generate."""
        done: dict[int, Completion] = {}
        costs = [EngineStats() for _ in self._workers]
        with self._closed_on_error():
            self._halt()
            shares = split_work(requests, len(self._workers))
            # a worker without rows is called too: its engine, awake since the update, gives its memory back
            shares += [[] for _ in self._workers[len(shares) :]] if shares else []
            tasks: deque[Task] = deque()
            for i, rows in enumerate(shares):
                share = [requests[row] for row in rows]
                beside = self._ahead.share(len(shares) - i) if self._fills(share) else []
                tasks.append(Task("generate", (self.weight_version, share, beside), rows))
            for worker, task, (completions, cost, texts) in self._run(tasks):
                costs[worker.index] += cost
                done |= zip(task.rows, completions, strict=True)
                self._ahead.learn(task.args[-1], texts, 0.0)
        return [done[i] for i in range(len(requests))], merge_stats(costs)

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]] | None, version: int, probe: Probe | None = None
    ) -> None:
        """See Engine.update_weights. From GPU to GPU, or one copy through the object store (see choose_route)."""
        if version < self.weight_version:
            raise RolloutError(f"weight version {version} is older than the workers' {self.weight_version}")
        if weights is None:
            raise RolloutError(NO_WEIGHTS)
        with self._closed_on_error():
            self.weight_version = version
            self._probe = probe
            self._delivery.take(weights)
            self._wait_idle()  # a worker that is replaced during this wait gets these weights
            self._delivery.choose(self._infos)
            if self._delivery.linked:
                self._delivery.send(version, probe)
            else:
                self._broadcast("update_weights", *self._state)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """See Engine.score."""
        with self._closed_on_error():
            ((_, _, outcome),) = self._run(deque([Task("score", (self.weight_version, tuple(tokens)))]))
        return outcome

    def begin(self, requests: Sequence[Request]) -> None:
        """See WorksAhead."""
        self._ahead.plan(requests)

    def stop(self) -> tuple[dict[int, AheadText], float]:
        """See WorksAhead."""
        with self._closed_on_error():
            self._halt()
        return self._ahead.take()

    def close(self) -> None:
        """Ends the worker processes; may be called twice."""
        for worker in self._workers:
            if worker.actor is not None and ray.is_initialized():
                ray.kill(worker.actor, no_restart=True)
        self._workers = []
        self._delivery.unlink()

    @property
    def _state(self) -> tuple[ray.ObjectRef | None, int, Probe | None]:
        """What a worker must have loaded before it serves."""
        return self._delivery.stored(), self.weight_version, self._probe

    def _fills(self, share: Sequence[Request]) -> bool:
        """Whether the passes of these rows have room for others; those of a baseline are its own."""
        return any(not request.plain for request in share) and all(info.fill for info in self._infos)

    def _start(self, worker: WorkerHandle) -> None:
        threads = max(1, int(self.cluster.cpus_per_worker))
        worker.start(self.cluster, self._build, self.spec, threads, *self._state)

    def _broadcast(self, method: str, *args: Any) -> None:
        """Calls every worker; one that is replaced before it answers starts from the current state instead."""
        for worker in self._workers:
            worker.submit(loading_s(self.cluster), method, *args)
        self._wait_idle()

    def _wait_idle(self) -> None:
        """Waits until no worker is busy; none works ahead any more."""
        self._halt()
        while any(worker.call for worker in self._workers):
            self._wait_one(deque())

    def _halt(self) -> None:
        """Ends the rollouts ahead within a pass, and keeps their texts."""
        for worker in self._workers:
            worker.halt(self.cluster.task_timeout_s)
        while any(worker.ahead for worker in self._workers):
            self._wait_one(deque())

    def _start_ahead(self) -> None:
        """Gives idle workers rows of the coming batch: each a share as large as if all idle workers had one."""
        left = sum(worker.call is None or worker.task is not None for worker in self._workers)
        for worker in self._workers:
            if worker.call is None and (requests := self._ahead.share(left)):
                worker.work_ahead(self.cluster.task_timeout_s, self.weight_version, requests)
                left -= 1

    def _run(self, tasks: deque[Task]) -> Iterator[tuple[WorkerHandle, Task, Any]]:
        """Yields tasks with their results as they end, until `tasks` stays empty; idle workers take the next one."""
        while tasks or any(worker.task for worker in self._workers):
            for worker in self._workers:
                if tasks and worker.call is None:
                    task = tasks.popleft()
                    worker.submit(self.cluster.task_timeout_s, task.method, *task.args, task=task)
                elif tasks:
                    worker.halt(self.cluster.task_timeout_s)
            if not tasks:
                self._start_ahead()
            if ended := self._wait_one(tasks):
                yield ended
        self._start_ahead()

    def _wait_one(self, tasks: deque[Task]) -> tuple[WorkerHandle, Task, Any] | None:
        """Waits for one call to end. The task of a worker that is lost is put back into `tasks`."""
        worker, outcome = wait_first(self._workers, self.cluster)
        task, ahead = worker.task, worker.ahead
        worker.ended()
        if isinstance(outcome, Lost):
            self._ahead.forget(ahead)
            self._replace(worker, outcome, len(task.rows) if task else len(ahead))
            tasks.extendleft([task] if task else [])
        elif task:
            self._losses.clear()
            return worker, task, outcome
        elif ahead:
            self._ahead.learn(ahead, *outcome)
        elif worker.info is None:
            worker.info = outcome
        return None

    def _replace(self, worker: WorkerHandle, lost: Lost, rows: int) -> None:
        """Starts a lost worker again. Args: rows: those that it was busy with."""
        doing = f" with {rows} rows" if rows else ""
        self._losses.append(f"{worker}{doing} {lost.reason}")
        if len(self._losses) > MOST_LOSSES:
            raise RolloutError(
                f"{len(self._losses)} workers were lost without a finished call between them. "
                f"The last: {self._losses[-1]}\nThe first: {self._losses[0]}"
            )
        logger.warning("%s; it is replaced and its rows are rolled out again", self._losses[-1])
        self.replaced += 1
        self._delivery.unlink()
        ray.kill(worker.actor, no_restart=True)
        self._start(worker)

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Closes a pool that raised: nobody waits for its calls in progress, so its state is unknown."""
        if not self._workers:
            raise RolloutError("the pool of rollout workers is closed")
        try:
            yield
        except BaseException:
            self.close()
            raise
