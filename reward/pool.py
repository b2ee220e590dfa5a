"""Killable worker processes for code that may hang, crash or use too much memory on text that a model wrote.

The calling thread enforces the deadline, by a socket timeout and SIGKILL of the worker's process group. Nothing that
the worker does (blocked signals, C code that never yields) can outlive it.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from specrl.reward.base import LimitError, RewardError, attempt
from specrl.reward.config import RewardConfig
from specrl.reward.worker import WorkerProcess

MAX_REQUEST_BYTES = 4 * 2**20
_BROKEN = (OSError, EOFError, ValueError)
"""What `WorkerProcess.ask` raises for a worker that died or violates the protocol."""


class WorkerError(RuntimeError):
    """The function in the worker raised; its traceback is the message."""


class WorkerDiedError(WorkerError):
    """Two workers, one after the other, died on the same request."""


class DeadlineError(LimitError, TimeoutError):
    """No reply within `timeout_s`; the worker was killed."""


class MemoryLimitError(LimitError, WorkerError):
    """The function ran out of memory twice, the second time in a new worker."""


class WorkerPool:
    """Processes that each run one handler, made in the worker by `target(*arguments)`.

    Args:
        target: "module:factory". The factory is called once per process and returns `handler(payload) -> value`, where
            payload and value are anything that JSON can represent. Start-up does not count towards `timeout_s`.
        limits: `workers`, `timeout_s` for one call, `memory_mb` and `start_timeout_s` of the configuration.
        canary: a payload that healthy workers answer in time; by default the slowest one so far that took at most half
            of `timeout_s`.

    Processes start on first use (or by `start()`), are replaced after a timeout or crash, and end with this process,
    whatever ends it. Any thread may call; after a fork the child starts workers of its own.
    """

    def __init__(
        self, target: str, limits: RewardConfig | None = None, arguments: Sequence[Any] = (), *, canary: Any = None
    ):
        self.limits = limits or RewardConfig()
        for name, least in (("workers", 1), ("timeout_s", 0.01), ("memory_mb", 0), ("start_timeout_s", 0.01)):
            value = getattr(self.limits, name)
            if not least <= value < float("inf"):
                raise RewardError(f"reward.{name} must be a number of at least {least}, got {value!r}")
        self._settings = {"target": target, "arguments": list(arguments), "memory_mb": self.limits.memory_mb}
        self._closed = False
        self._canary = canary
        self._canary_s = 0.0 if canary is None else float("inf")
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[WorkerProcess | None] = [None] * self.limits.workers  # None: no process is running yet
        self._live: set[WorkerProcess] = set()

    def pids(self) -> list[int]:
        """Process ids of the workers that are running."""
        with self._changed:
            return sorted(worker.process.pid for worker in self._live)

    def start(self) -> None:
        """Starts one worker now. Raises RewardError when the target cannot be loaded."""
        self._put(self._take())

    def call(self, payload: Any) -> Any:
        """`handler(payload)` in a worker.

        A worker that dies or runs out of memory is replaced and the request repeated once: the cause may have been
        outside, such as the kernel's out-of-memory killer, or earlier requests.

        Raises:
            DeadlineError: no reply within `timeout_s`. TimeoutError: the handler raised one.
            MemoryLimitError, WorkerDiedError: both attempts failed so. WorkerError: the handler raised anything else.
            TypeError, ValueError: JSON cannot represent the payload, or it is too long.
            RewardError: no worker can be started, or the pool is closed.
        """
        with suppress(MemoryLimitError, WorkerDiedError):
            return self._attempt_call(payload)
        return self._attempt_call(payload)

    def _attempt_call(self, payload: Any) -> Any:
        request = json.dumps(payload).encode() + b"\n"
        if len(request) > MAX_REQUEST_BYTES:
            raise ValueError(f"the input has {len(request)} bytes; a worker takes at most {MAX_REQUEST_BYTES}")
        timeout_s = self.limits.timeout_s
        worker = self._take()
        began = time.monotonic()
        try:
            reply = self._ask(worker, request, timeout_s)
            if reply.get("kind") == "memory":
                self._discard(worker)
        except TimeoutError:
            raise DeadlineError(f"no result within reward.timeout_s={timeout_s:g} s; worker killed") from None
        except _BROKEN as error:
            reason = f"the reward worker died twice on this input ({worker.exit_reason()}): {error}"
            raise WorkerDiedError(reason) from None
        finally:
            self._put(worker)
        if reply.get("kind") == "memory":
            raise MemoryLimitError(
                f"out of memory under reward.memory_mb={self.limits.memory_mb}, twice:\n{reply['error']}"
            )
        if reply.get("kind") == "timeout":
            raise TimeoutError(reply["error"])
        if "error" in reply:
            raise WorkerError(reply["error"])
        took = time.monotonic() - began
        if self._canary_s < took <= timeout_s / 2:
            self._canary = payload
            self._canary_s = took
        return reply["value"]

    def map(self, payloads: Sequence[Any]) -> list[Any]:
        """`call` for each payload, `workers` at a time; for a call that failed the list has its exception.

        A LimitError is `caused_by_text` when the workers answer the canary after the last call. Only RewardError is
        raised: without workers nothing can be scored.
        """
        call = partial(attempt, self.call)
        if self.limits.workers == 1:  # in this thread, where an interrupt reaches it
            outcomes = [call(payload) for payload in payloads]
        else:
            with ThreadPoolExecutor(self.limits.workers) as threads:
                outcomes = list(threads.map(call, payloads))
        over = [outcome for outcome in outcomes if isinstance(outcome, LimitError)]
        if over and self._canary is not None and not isinstance(call(self._canary), Exception):
            for error in over:
                error.caused_by_text = True
        return outcomes

    def close(self) -> None:
        """Kills every worker; calls in progress in other threads raise RewardError. Idempotent."""
        with self._changed:
            self._closed = True
            workers = list(self._live)
            self._live.clear()
            self._idle.clear()
            self._changed.notify_all()
        for worker in workers:
            worker.kill()

    def _take(self) -> WorkerProcess:
        """An idle, healthy worker; it is started or replaced here if necessary."""
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
        """A worker that reported ready; when one dies while starting, a second one is tried."""
        name = f"the reward worker for {self._settings['target']}{self._settings['arguments'] or ''}"
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
                    f"{name} was not ready after reward.start_timeout_s={limits.start_timeout_s:g} s and was killed"
                ) from None
            except _BROKEN:
                trouble = f"it died twice while starting ({worker.exit_reason()}); see its messages above"
                continue
            if reply.get("ready"):
                return worker
            self._discard(worker)
            trouble = reply["error"]
            break
        hint = f"reward.memory_mb={limits.memory_mb} limits its address space; raise it for heavy imports"
        raise RewardError(f"{name} cannot start: {trouble}\n({hint})")

    def _ask(self, worker: WorkerProcess, request: bytes, timeout_s: float) -> dict[str, Any]:
        """A worker's reply. Any exception, an interrupt too, ends the worker: its late reply would otherwise be taken
        for the answer to the next request.
        """
        try:
            return worker.ask(request, time.monotonic() + timeout_s)
        except BaseException:
            self._discard(worker)
            raise

    def _put(self, worker: WorkerProcess | None) -> None:
        """Makes a worker available again, or the right to start one if it was killed."""
        with self._changed:
            if self._closed:
                return
            if worker is None or worker.killed:
                self._idle.insert(0, None)  # at the front, as `_take` prefers a running worker
            else:
                self._idle.append(worker)
            self._changed.notify()

    def _discard(self, worker: WorkerProcess) -> None:
        worker.kill()
        with self._changed:
            self._live.discard(worker)

    def _after_fork(self) -> None:
        """In a forked child: the workers belong to the parent, and a thread that is not here may hold the lock."""
        for worker in self._live:
            worker.release()
            worker.process.returncode = 0  # so that this process does not wait for it
        self._reset()
        if self._closed:
            self._idle.clear()


def _after_fork() -> None:
    for pool in list(_pools):
        pool._after_fork()


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)
