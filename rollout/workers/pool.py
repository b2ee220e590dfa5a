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
from specrl.rollout.sections import ClusterConfig
from specrl.rollout.types import AheadText, Completion, EngineStats, Request, RolloutError
from specrl.rollout.workers.ahead import Ahead
from specrl.rollout.workers.calls import Task, WorkerHandle, call_each, merge_stats, wait_first
from specrl.rollout.workers.delivery import Delivery
from specrl.rollout.workers.worker import Failure, Share, WorkerInfo, gpu_uuid, split_work

logger = logging.getLogger(__name__)


class RolloutPool:
    """An Engine made of `cluster.num_workers` Ray actors; needs a connected Ray (specrl.run.cluster.connect).

    Workers that die or hang are replaced, and get the current weights before they serve; their calls are repeated. A
    prompt that the engine cannot handle is returned as failed completions, the others are unaffected. Any other error
    is a RolloutError, after which the pool is closed.

    It works ahead (WorksAhead): workers without a row of the current batch begin those of the next one, until the pool
    is called again. One that dies or hangs then costs drafts, and counts as any other fault.

    Args:
        spec: what each worker builds.
        cluster: number of workers, their size, deadlines and limits.
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
        self._faults: list[str] = []  # since a task was last finished
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

    def generate(self, requests: Sequence[Request]) -> tuple[list[Completion], EngineStats]:
        """See Engine.generate. Rows without a response have `Completion.failure`."""
        done: list[Completion | None] = [None] * len(requests)
        costs = [EngineStats() for _ in self._workers]
        first: Failure | None = None
        with self._closed_on_error():
            self._halt()
            shares = split_work(requests, len(self._workers) * self.cluster.tasks_per_worker)
            tolerated = max((len(group) for share in shares for group in share), default=0)  # one bad prompt
            # a worker without rows is called too: its engine, awake since the update, gives its memory back
            idle: list[Share] = [[] for _ in range(len(self._workers) - len(shares) if shares else 0)]
            tasks = deque(self._task(requests, share) for share in [*shares, *idle])
            for worker, task, outcome in self._run(tasks):
                rows = [i for group in task.share for i in group]
                if not isinstance(outcome, Failure):
                    completions, cost = outcome
                    costs[worker.index] += cost
                elif not rows:
                    raise RolloutError(f"{worker} failed without any rows: {outcome}")
                elif outcome.kind == "memory" or len(task.share) > 1:
                    tasks.extendleft(self._halves(requests, task.share, outcome))
                    continue
                else:
                    first = first or outcome
                    version = self.weight_version
                    completions = [
                        Completion([], [], [], [], "length", version, 0, failure=outcome.reason) for _ in rows
                    ]
                for i, completion in zip(rows, completions, strict=True):
                    done[i] = completion
                self._check_failed(done, first, tolerated)
        return [completion for completion in done if completion], merge_stats(costs)

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
            if isinstance(outcome, Failure):
                raise RolloutError(f"the workers cannot score {len(tokens)} tokens: {outcome}")
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

    def _task(self, requests: Sequence[Request], share: Share) -> Task:
        rows = [requests[i] for group in share for i in group]
        return Task("generate", (self.weight_version, rows), share)

    def _halves(self, requests: Sequence[Request], share: Share, failure: Failure) -> list[Task]:
        """The share split in two: to fit the memory, or to isolate the prompt that fails."""
        if len(share) == 1:  # out of memory with the rows of one prompt
            share = [[i] for i in share[0]]
        if len(share) == 1:
            raise RolloutError(
                f"a worker is out of memory with 1 of {len(requests)} rows. Use a smaller rollout.rows_per_batch, "
                f"rollout.tokens_per_pass or rollout.logits_mb. {failure}"
            )
        middle = len(share) // 2
        return [self._task(requests, half) for half in (share[:middle], share[middle:])]

    def _check_failed(self, done: Sequence[Completion | None], first: Failure | None, tolerated: int) -> None:
        failed = sum(c is not None and bool(c.failure) for c in done)
        if failed > max(tolerated, self.cluster.max_failed_ratio * len(done)) or (failed and failed == len(done)):
            raise RolloutError(
                f"{failed} of {len(done)} rows failed in the engine, more than "
                f"cluster.max_failed_ratio={self.cluster.max_failed_ratio:g} allows. The first: {first}"
            )

    @property
    def _state(self) -> tuple[ray.ObjectRef | None, int, Probe | None]:
        """What a worker must have loaded before it serves."""
        return self._delivery.stored(), self.weight_version, self._probe

    def _start(self, worker: WorkerHandle) -> None:
        threads = max(1, int(self.cluster.cpus_per_worker))
        worker.start(self.cluster, self._build, self.spec, threads, *self._state)

    def _broadcast(self, method: str, *args: Any) -> None:
        """Calls every worker; one that is replaced before it answers starts from the current state instead."""
        for worker in self._workers:
            worker.submit(self.cluster.start_timeout_s, method, *args)
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

    def _run(self, tasks: deque[Task]) -> Iterator[tuple[WorkerHandle, Task, Any | Failure]]:
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

    def _wait_one(self, tasks: deque[Task]) -> tuple[WorkerHandle, Task, Any | Failure] | None:
        """Waits for one call to end. A task whose worker had to be repaired is put back into `tasks`."""
        worker, outcome = wait_first(self._workers, self.cluster)
        task, ahead = worker.task, worker.ahead
        worker.ended()
        kind = outcome.kind if isinstance(outcome, Failure) else "done"
        if kind == "lost" or ((task or ahead) and kind in ("stale", "broken")):
            self._ahead.forget(ahead)
            self._repair(worker, outcome, sum(map(len, task.share)) if task else len(ahead))
            tasks.extendleft([task] if task else [])
            return None
        if ahead:
            self._note_ahead(worker, ahead, outcome)
            return None
        if task:
            if kind == "done":
                self._faults.clear()
            return worker, task, outcome
        if isinstance(outcome, Failure):
            raise RolloutError(f"{worker} could not be brought to weight version {self.weight_version}: {outcome}")
        worker.info = outcome if worker.info is None else worker.info
        return None

    def _note_ahead(self, worker: WorkerHandle, requests: Sequence[Request], outcome: Any | Failure) -> None:
        """Stores the texts of rows ahead; rows that fail are left to their own batch, which handles errors."""
        if isinstance(outcome, Failure):
            logger.warning("%s failed on %d rows ahead of their turn: %s", worker, len(requests), outcome)
            self._ahead.forget(requests, wanted=False)
        else:
            self._ahead.learn(requests, *outcome)

    def _repair(self, worker: WorkerHandle, failure: Failure, rows: int) -> None:
        """Replaces a lost or broken worker, busy with so many rows; one with stale weights gets the current ones."""
        doing = f" with {rows} rows" if rows else ""
        self._faults.append(f"{worker}{doing} {failure}")
        if len(self._faults) > self.cluster.max_restarts:
            raise RolloutError(
                f"{len(self._faults)} faults of workers without a finished share between them, more than "
                f"cluster.max_restarts={self.cluster.max_restarts} allows. The last: {self._faults[-1]}\n"
                f"The first: {self._faults[0]}"
            )
        logger.warning("%s; it is repaired and its rows are rolled out again", self._faults[-1])
        if failure.kind == "stale":
            worker.submit(self.cluster.start_timeout_s, "update_weights", *self._state)
        else:
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
