"""Rollout workers on Ray: an Engine whose rows are decoded by actors, each with an engine of its own.

The noise of a rollout belongs to its rows, so a row is the same wherever it is decoded: work can be spread, stolen, cut
and done again without changing a token. Ray restarts and retries nothing by itself, as an actor it restarted would hold
the weights of the model's files. The pool does it: it knows the weights, their version and their probe.
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
from specrl.rollout.engines.base import Engine, EngineSpec, Probe
from specrl.rollout.sections import ClusterConfig
from specrl.rollout.types import AheadText, Completion, EngineStats, Request, RolloutError
from specrl.rollout.workers.ahead import Ahead
from specrl.rollout.workers.calls import Place, Task, ask_each, first_to_end, together
from specrl.rollout.workers.delivery import Delivery
from specrl.rollout.workers.worker import Failure, Share, gpu, spread

logger = logging.getLogger(__name__)

MAX_SPLITS = 3
"""How often a share that runs out of memory is cut in two."""


class RolloutPool:
    """An Engine made of `cluster.num_workers` Ray actors; needs a connected Ray (specrl.run.cluster.connect).

    Workers that die or hang are replaced, and get the current weights before they serve; what they were doing is done
    again. A prompt that the engine cannot handle comes back as failed completions, the others unaffected. Whatever else
    goes wrong is a RolloutError, after which the pool is closed.

    It works ahead (WorksAhead): workers without a row of the current batch begin those of the next one, until the pool
    is called again. One that dies or hangs meanwhile costs drafts, and counts as any other fault.

    Args:
        spec: what each worker builds.
        cluster: number of workers, their size, deadlines and limits.
        build: makes a worker's engine.

    Raises:
        RolloutError: a worker could not start.
    """

    own_weights = True

    def __init__(self, spec: EngineSpec, cluster: ClusterConfig, build: Callable[[EngineSpec], Engine] = build_engine):
        self.spec, self.cluster, self.weight_version = spec, cluster, 0
        self.replaced = 0
        """Workers replaced so far."""
        self._build = build
        self._probe: Probe | None = None
        self._faults: list[str] = []  # since a task was last finished
        self._workers = [Place(i) for i in range(cluster.num_workers)]
        ask = partial(ask_each, self._workers, cluster)
        self._delivery = Delivery(ray.put, ask, ray.util.get_node_ip_address())
        self._ahead = Ahead()
        with self._closed_on_error():
            for worker in self._workers:
                self._start(worker)
            self._settle()
        started = [worker.started for worker in self._workers]
        self.not_ahead = ""
        if not all(each.ahead for each in started):
            self.not_ahead = "the workers' engine cannot be stopped between passes"
        elif (own := gpu()) and any(each.gpu == own for each in started):
            self.not_ahead = "a rollout worker shares the trainer's GPU"

    def generate(self, requests: Sequence[Request]) -> tuple[list[Completion], EngineStats]:
        """See Engine.generate. Rows without a response have `Completion.failure`."""
        done: list[Completion | None] = [None] * len(requests)
        costs = [EngineStats() for _ in self._workers]
        first: Failure | None = None
        with self._closed_on_error():
            self._halt()
            shares = spread(requests, len(self._workers) * self.cluster.tasks_per_worker)
            tolerated = max((len(group) for share in shares for group in share), default=0)  # a poisoned prompt
            # a worker without rows is called too: its engine, awake since the update, gives its memory back
            idle = [[] for _ in range(len(self._workers) - len(shares) if shares else 0)]
            tasks = deque(self._task(requests, share) for share in [*shares, *idle])
            for worker, task, outcome in self._run(tasks):
                rows = [i for group in task.share for i in group]
                if not isinstance(outcome, Failure):
                    completions, cost = outcome
                    costs[worker.index] += cost
                elif not rows:
                    raise RolloutError(f"{worker} failed without any rows: {outcome}")
                elif outcome.kind == "memory" or len(task.share) > 1:
                    tasks.extendleft(self._halves(requests, task, outcome))
                    continue
                else:
                    first = first or outcome
                    at, why = self.weight_version, outcome.reason
                    completions = [Completion([], [], [], [], "length", at, 0, failure=why) for _ in rows]
                for i, completion in zip(rows, completions, strict=True):
                    done[i] = completion
                self._check_failed(done, first, tolerated)
        return done, together(costs)

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]] | None, version: int, probe: Probe | None = None
    ) -> None:
        """See Engine.update_weights. From GPU to GPU, or one copy through the object store (see choose_route)."""
        if version < self.weight_version:
            raise RolloutError(f"weight version {version} is older than the workers' {self.weight_version}")
        with self._closed_on_error():
            self.weight_version, self._probe = version, probe
            if weights is not None:
                self._delivery.take(weights)
            self._settle()  # a worker that is replaced meanwhile gets these
            if weights is not None:
                self._delivery.choose([worker.started for worker in self._workers])
            if weights is not None and self._delivery.linked:
                self._delivery.send(version, probe)
            else:
                self._broadcast("update_weights", *self._state)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """See Engine.score."""
        with self._closed_on_error():
            for _, _, outcome in self._run(deque([Task("score", (self.weight_version, tuple(tokens)))])):
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

    def reset_cache(self) -> None:
        with self._closed_on_error():
            self._settle()
            self._broadcast("reset_cache")

    def close(self) -> None:
        """Ends the worker processes; may be called twice."""
        for worker in self._workers:
            if worker.actor is not None and ray.is_initialized():
                ray.kill(worker.actor, no_restart=True)
        self._workers = []
        self._delivery.unlink()

    def _task(self, requests: Sequence[Request], share: Share, splits: int = 0) -> Task:
        rows = [requests[i] for group in share for i in group]
        return Task("generate", (self.weight_version, rows), share, splits)

    def _halves(self, requests: Sequence[Request], task: Task, failure: Failure) -> list[Task]:
        """The task in two: to fit the memory, or to find the prompt that fails."""
        out_of_memory = failure.kind == "memory"
        share = task.share if len(task.share) > 1 else [[i] for i in task.share[0]]
        if out_of_memory and (task.splits == MAX_SPLITS or len(share) == 1):
            rows = sum(map(len, task.share))
            raise RolloutError(
                f"a worker is out of memory with {rows} of {len(requests)} rows, cut {task.splits} times. Use a "
                f"smaller rollout.rows_per_batch, rollout.tokens_per_pass or rollout.logits_mb. {failure}"
            )
        middle = len(share) // 2
        splits = task.splits + out_of_memory
        return [self._task(requests, half, splits) for half in (share[:middle], share[middle:])]

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

    def _start(self, worker: Place) -> None:
        threads = max(1, int(self.cluster.cpus_per_worker))
        worker.start(self.cluster, self._build, self.spec, threads, *self._state)

    def _broadcast(self, method: str, *args: Any) -> None:
        """Calls every worker; one that is replaced meanwhile needs no call, as it starts from the current state."""
        for worker in self._workers:
            worker.submit(self.cluster.start_timeout_s, method, *args)
        self._settle()

    def _settle(self) -> None:
        """Waits until no worker is busy; none works ahead any more."""
        self._halt()
        while any(worker.call for worker in self._workers):
            self._step(deque())

    def _halt(self) -> None:
        """Ends within a pass what workers roll out ahead, and keeps it."""
        for worker in self._workers:
            worker.halt(self.cluster.task_timeout_s)
        while any(worker.ahead for worker in self._workers):
            self._step(deque())

    def _feed(self) -> None:
        """Gives rows of the coming batch to workers that have nothing to do, as many as they would be left with."""
        left = sum(worker.call is None or worker.task is not None for worker in self._workers)
        for worker in self._workers:
            if worker.call is None and (requests := self._ahead.share(left)):
                worker.work_ahead(self.cluster.task_timeout_s, self.weight_version, requests)
                left -= 1

    def _run(self, tasks: deque[Task]) -> Iterator[tuple[Place, Task, Any | Failure]]:
        """Yields tasks with their results as they end, until `tasks` stays empty; idle workers take the next one."""
        while tasks or any(worker.task for worker in self._workers):
            for worker in self._workers:
                if tasks and worker.call is None:
                    task = tasks.popleft()
                    worker.submit(self.cluster.task_timeout_s, task.method, *task.args, task=task)
                elif tasks:
                    worker.halt(self.cluster.task_timeout_s)
            if not tasks:
                self._feed()
            if ended := self._step(tasks):
                yield ended
        self._feed()

    def _step(self, tasks: deque[Task]) -> tuple[Place, Task, Any | Failure] | None:
        """Waits for one call to end. A task whose worker had to be repaired goes back to `tasks`."""
        worker, outcome = first_to_end(self._workers, self.cluster)
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
        if kind != "done":
            raise RolloutError(f"{worker} could not be brought to weight version {self.weight_version}: {outcome}")
        worker.started = worker.started or outcome
        return None

    def _note_ahead(self, worker: Place, requests: Sequence[Request], outcome: Any | Failure) -> None:
        """What came of rows ahead; those that fail are left to their turn, which knows what to do about it."""
        if isinstance(outcome, Failure):
            logger.warning("%s failed on %d rows ahead of their turn: %s", worker, len(requests), outcome)
            self._ahead.forget(requests, wanted=False)
        else:
            self._ahead.learn(requests, *outcome)

    def _repair(self, worker: Place, failure: Failure, rows: int) -> None:
        """Replaces a lost or broken worker, busy with so many rows; one with other weights gets the current ones."""
        doing = f" with {rows} rows" if rows else ""
        self._faults.append(f"{worker}{doing} {failure}")
        if len(self._faults) > self.cluster.max_restarts:
            raise RolloutError(
                f"{len(self._faults)} faults of workers without a finished share between them, more than "
                f"cluster.max_restarts={self.cluster.max_restarts} allows. The last: {self._faults[-1]}\n"
                f"The first: {self._faults[0]}"
            )
        logger.warning("%s; it is repaired and its rows are done again", self._faults[-1])
        if failure.kind == "stale":
            worker.submit(self.cluster.start_timeout_s, "update_weights", *self._state)
        else:
            self.replaced += 1
            self._delivery.unlink()
            ray.kill(worker.actor, no_restart=True)
            self._start(worker)

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """A pool that raised has calls in flight that nobody waits for; it is closed rather than trusted."""
        if not self._workers:
            raise RolloutError("the pool of rollout workers is closed")
        try:
            yield
        except BaseException:
            self.close()
            raise
