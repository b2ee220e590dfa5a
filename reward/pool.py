"""Killable worker processes for code that may hang, crash or eat memory on text a model wrote.

The deadline is enforced in the calling thread, by a socket timeout and SIGKILL of the worker's process group:
nothing the worker does (signals blocked, C code that never yields) can outlive it.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from specrl.reward.base import LimitError, RewardError, attempt
from specrl.reward.config import RewardConfig
from specrl.reward.worker import WorkerProcess

MAX_REQUEST_BYTES = 4 * 2**20
_BROKEN = (OSError, EOFError, ValueError)
"""What `WorkerProcess.ask` raises for a worker that died or does not keep to the protocol."""


class WorkerError(RuntimeError):
    """The function in the worker raised (its traceback is the message), or the worker died twice on one request."""


class DeadlineError(LimitError, TimeoutError):
    """No reply within `timeout_s`; the worker was killed."""


class MemoryLimitError(LimitError, WorkerError):
    """The handler ran out of memory twice, the second time in a fresh worker."""


class WorkerPool:
    """Processes that each run one handler, built in the worker by `target(*arguments)`.

    target           "module:factory"; the factory is called once per process and returns `handler(payload) -> value`,
                     payload and value being anything JSON carries. Start-up does not count against `timeout_s`.
    limits           `workers`, `timeout_s` for one call, `memory_mb` and `start_timeout_s` of the configuration
    canary           a payload that healthy workers answer in time, whatever texts do to them; by default the one that
                     took longest so far, of those that took at most half of `timeout_s`

    Processes start on first use (or `start()`), are replaced after a timeout or crash, and die with this process,
    whatever kills it. Any thread may call; after a fork the child starts workers of its own.
    """

    def __init__(
        self, target: str, limits: RewardConfig | None = None, arguments: Sequence[Any] = (), *, canary: Any = None
    ):
        self.limits = limits = limits or RewardConfig()
        for name, least in (("workers", 1), ("timeout_s", 0.01), ("memory_mb", 0), ("start_timeout_s", 0.01)):
            if not least <= (value := getattr(limits, name)) < float("inf"):
                raise RewardError(f"reward.{name} must be a number of at least {least}, got {value!r}")
        self._settings = {"target": target, "arguments": list(arguments), "memory_mb": limits.memory_mb}
        self._closed = False
        self._canary, self._canary_s = canary, 0.0 if canary is None else float("inf")
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[WorkerProcess | None] = [None] * self.limits.workers  # None: a slot without a process
        self._live: set[WorkerProcess] = set()

    def pids(self) -> list[int]:
        """Process ids of the workers that are running."""
        with self._changed:
            return sorted(worker.process.pid for worker in self._live)

    def start(self) -> None:
        """Start one worker now, to learn at once whether the target can be loaded. RewardError when it cannot."""
        self._put(self._take())

    def call(self, payload: Any) -> Any:
        """`handler(payload)` in a worker.

        Raises DeadlineError at the deadline, TimeoutError when the handler raised one, MemoryLimitError, WorkerError
        when the handler raised anything else or killed its worker, TypeError or ValueError for a payload that JSON
        cannot carry or that is too long, RewardError when no worker can be started or the pool is closed.
        A worker that dies or runs out of memory is replaced and the request repeated once: the cause may have been
        outside, such as the kernel's out-of-memory killer, or rows that came before.
        """
        request = json.dumps(payload).encode() + b"\n"
        if len(request) > MAX_REQUEST_BYTES:
            raise ValueError(
                f"the input is {len(request)} bytes long, more than the {MAX_REQUEST_BYTES} a worker takes"
            )
        trouble: WorkerError
        timeout_s = self.limits.timeout_s
        for _ in range(2):
            worker, began = self._take(), time.monotonic()
            try:
                reply = self._ask(worker, request, timeout_s)
                if reply.get("kind") == "memory":
                    self._discard(worker)
            except TimeoutError:
                raise DeadlineError(f"no result within reward.timeout_s={timeout_s:g} s; worker killed") from None
            except _BROKEN as error:
                trouble = WorkerError(f"the reward worker died twice on this input ({worker.ending()}): {error}")
                continue
            finally:
                self._put(worker)
            if reply.get("kind") == "memory":
                trouble = MemoryLimitError(
                    f"out of memory under reward.memory_mb={self.limits.memory_mb}, twice:\n{reply['error']}"
                )
                continue
            if reply.get("kind") == "timeout":
                raise TimeoutError(reply["error"])
            if "error" in reply:
                raise WorkerError(reply["error"])
            if self._canary_s < (took := time.monotonic() - began) <= timeout_s / 2:
                self._canary, self._canary_s = payload, took
            return reply["value"]
        raise trouble

    def map(self, payloads: Sequence[Any]) -> list[Any]:
        """`call` for each payload, `workers` at a time; a call that failed leaves its exception in its place.

        A LimitError is `of_text` when the canary is answered after the last of them. Only RewardError is raised:
        without workers nothing can be scored.
        """
        outcome = partial(attempt, self.call)
        if self.limits.workers == 1:  # here, where an interrupt reaches it
            outcomes = [outcome(payload) for payload in payloads]
        else:
            with ThreadPoolExecutor(self.limits.workers) as threads:
                outcomes = list(threads.map(outcome, payloads))
        over = [result for result in outcomes if isinstance(result, LimitError)]
        if over and self._canary is not None and not isinstance(outcome(self._canary), Exception):
            for error in over:
                error.of_text = True
        return outcomes

    def close(self) -> None:
        """Kill every worker; calls under way in other threads raise RewardError. Idempotent."""
        with self._changed:
            self._closed = True
            workers, self._live = list(self._live), set()
            self._idle.clear()
            self._changed.notify_all()
        for worker in workers:
            worker.kill()

    def _take(self) -> WorkerProcess:
        """An idle, living worker; started or replaced here when needed."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self._closed)
            if self._closed:
                raise RewardError("the reward workers were closed; a closed pool or reward cannot score any more")
            worker = self._idle.pop()
        if worker is not None and worker.healthy():
            return worker
        if worker is not None:
            self._discard(worker)
        try:
            return self._start()
        except BaseException:
            self._put(None)
            raise

    def _start(self) -> WorkerProcess:
        """A worker that reported ready; one that died while starting is tried once more."""
        what = f"the reward worker for {self._settings['target']}{self._settings['arguments'] or ''}"
        limits = self.limits
        for _ in range(2):
            worker = WorkerProcess(self._settings)
            with self._changed:
                self._live.add(worker)
                closed = self._closed
            try:
                reply = {"error": "closed"} if closed else self._ask(worker, b"", limits.start_timeout_s)
            except TimeoutError:
                raise RewardError(
                    f"{what} was not ready after reward.start_timeout_s={limits.start_timeout_s:g} s and was killed"
                ) from None
            except _BROKEN:
                trouble = f"it died twice while starting ({worker.ending()}); see its messages above"
                continue
            if reply.get("ready"):
                return worker
            self._discard(worker)
            trouble = reply["error"]
            break
        hint = f"reward.memory_mb={limits.memory_mb} limits its address space; raise it for heavy imports"
        raise RewardError(f"{what} cannot start: {trouble}\n({hint})")

    def _ask(self, worker: WorkerProcess, request: bytes, timeout_s: float) -> dict[str, Any]:
        """A worker's reply. Whatever is raised instead, an interrupt too, ends it: its late reply would answer the
        next request.
        """
        try:
            return worker.ask(request, time.monotonic() + timeout_s)
        except BaseException:
            self._discard(worker)
            raise

    def _put(self, worker: WorkerProcess | None) -> None:
        """Gives a place back, empty when its worker was killed."""
        worker = None if worker is None or worker.killed else worker
        with self._changed:
            if not self._closed:
                # Empty slots go to the front: a running worker is preferred.
                self._idle.insert(len(self._idle) if worker else 0, worker)
                self._changed.notify()

    def _discard(self, worker: WorkerProcess) -> None:
        worker.kill()
        with self._changed:
            self._live.discard(worker)

    def _after_fork(self) -> None:
        """In a forked child: the workers belong to the parent, and a lock may be held by a thread that is not here."""
        for worker in self._live:
            worker.abandon()
            worker.process.returncode = 0  # not ours to wait for
        self._reset()
        if self._closed:
            self._idle.clear()


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [pool._after_fork() for pool in list(_pools)])
