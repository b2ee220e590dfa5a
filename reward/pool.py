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
from functools import partial
from queue import LifoQueue
from typing import Any

from specrl.reward.base import LimitError, RewardError, attempt
from specrl.reward.config import RewardConfig
from specrl.reward.worker import WorkerProcess

START_TIMEOUT_S = 300.0
"""Seconds in which a worker imports what it needs."""
_BROKEN = (OSError, EOFError, ValueError)
"""What `WorkerProcess.ask` raises for a worker that died or violates the protocol."""


class WorkerError(RuntimeError):
    """The function in the worker raised, with its traceback as the message; or two workers died on the same request."""


class DeadlineError(LimitError, TimeoutError):
    """No reply within `timeout_s`; the worker was killed."""


KINDS = {"deadline": DeadlineError, "memory": LimitError, "timeout": TimeoutError}
"""Errors by the kind of a reply; others are a WorkerError."""


class WorkerPool:
    """Processes that each run one handler, made in the worker by `target(*arguments)`.

    Args:
        target: "module:factory". The factory is called once per process and returns `handler(payload) -> value`, where
            payload and value are anything that JSON can represent. Start-up does not count towards `timeout_s`.
        limits: `workers`, `timeout_s` for one call and `memory_mb` of the configuration.
        canary: a payload that healthy workers answer in time; by default the slowest one so far that took at most half
            of `timeout_s`.
        start_timeout_s: seconds for a worker to start.

    Processes start on first use (or by `start()`), are replaced after a timeout or crash, and end with this process,
    whatever ends it. Any thread may call; after a fork the child starts workers of its own.
    """

    def __init__(
        self,
        target: str,
        limits: RewardConfig | None = None,
        arguments: Sequence[Any] = (),
        *,
        canary: Any = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ):
        self.limits = limits or RewardConfig()
        for name, least in (("workers", 1), ("timeout_s", 0.01), ("memory_mb", 0)):
            value = getattr(self.limits, name)
            if not least <= value < float("inf"):
                raise RewardError(f"reward.{name} must be a number of at least {least}, got {value!r}")
        self._start_timeout_s = start_timeout_s
        self._settings = {"target": target, "arguments": list(arguments), "memory_mb": self.limits.memory_mb}
        self._closed = False
        self._canary = canary
        self._canary_s = 0.0 if canary is None else float("inf")
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._live: set[WorkerProcess] = set()
        self._free: LifoQueue[WorkerProcess | None] = LifoQueue()  # None: no process is running yet
        for _ in range(self.limits.workers):
            self._free.put(None)

    def pids(self) -> list[int]:
        """Process ids of the workers that are running."""
        with self._lock:
            return sorted(worker.process.pid for worker in self._live)

    def start(self) -> None:
        """Starts one worker now. Raises RewardError when the target cannot be loaded."""
        self._free.put(self._take())

    def call(self, payload: Any) -> Any:
        """`handler(payload)` in a worker.

        A worker that dies or runs out of memory is replaced and the request repeated once: the cause may have been
        outside, such as the kernel's out-of-memory killer, or earlier requests.

        Raises:
            DeadlineError: no reply within `timeout_s`. TimeoutError: the handler raised one.
            LimitError: it ran out of memory twice. WorkerError: two workers died, or it raised anything else.
            TypeError, ValueError: JSON cannot represent the payload.
            RewardError: no worker can be started, or the pool is closed.
        """
        request = json.dumps(payload).encode() + b"\n"
        reply = self._reply(request)
        if reply.get("kind") in ("died", "memory"):
            reply = self._reply(request)
        if "error" in reply:
            raise KINDS.get(reply["kind"], WorkerError)(reply["error"])
        if self._canary_s < reply["took"] <= self.limits.timeout_s / 2:
            self._canary = payload
            self._canary_s = reply["took"]
        return reply["value"]

    def _reply(self, request: bytes) -> dict[str, Any]:
        """What a worker answers, or an error of the kind "deadline", "memory" or "died"."""
        worker = self._take()
        began = time.monotonic()
        try:
            reply = self._ask(worker, request, self.limits.timeout_s)
            if reply.get("kind") == "memory":
                self._discard(worker)
                text = f"out of memory under reward.memory_mb={self.limits.memory_mb}, twice:\n{reply['error']}"
                return {"kind": "memory", "error": text}
            return {"took": time.monotonic() - began, **reply}
        except TimeoutError:
            text = f"no result within reward.timeout_s={self.limits.timeout_s:g} s; worker killed"
            return {"kind": "deadline", "error": text}
        except _BROKEN as error:
            text = f"the reward worker died twice on this input (exit code {worker.process.returncode}): {error}"
            return {"kind": "died", "error": text}
        finally:
            self._free.put(None if worker.killed else worker)

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

    def map_once(self, payloads: Sequence[Any]) -> list[Any]:
        """`map`, in which equal payloads are one call: for handlers that always answer the same alike."""
        keys = [json.dumps(payload, sort_keys=True, default=str) for payload in payloads]
        distinct = dict(zip(keys, payloads, strict=True))
        answers = dict(zip(distinct, self.map([*distinct.values()]), strict=True))
        return [answers[key] for key in keys]

    def close(self) -> None:
        """Kills every worker; calls in progress in other threads raise RewardError. Idempotent."""
        with self._lock:
            self._closed = True
            workers = list(self._live)
            self._live.clear()
        for worker in workers:
            worker.kill()
        self._free.put(None)  # for a thread that waits

    def _take(self) -> WorkerProcess:
        """A free worker, which is started here if none runs."""
        worker = self._free.get()
        if self._closed:
            self._free.put(None)  # for the next thread that waits
            raise RewardError("the reward workers were closed; a closed pool or reward cannot score any more")
        try:
            return worker or self._start()
        except BaseException:
            self._free.put(None)
            raise

    def _start(self) -> WorkerProcess:
        """A worker that reported ready; when one dies while starting, a second one is tried."""
        name = f"the reward worker for {self._settings['target']}{self._settings['arguments'] or ''}"
        for _ in range(2):
            worker = WorkerProcess(self._settings)
            with self._lock:
                self._live.add(worker)
                closed = self._closed
            try:
                reply = {"error": "closed"} if closed else self._ask(worker, b"", self._start_timeout_s)
            except TimeoutError:
                raise RewardError(
                    f"{name} was not ready after {self._start_timeout_s:g} s, which its imports took, and was killed"
                ) from None
            except _BROKEN:
                trouble = (
                    f"it died twice while starting (exit code {worker.process.returncode}); see its messages above"
                )
                continue
            if "error" not in reply:
                return worker
            self._discard(worker)
            trouble = reply["error"]
            break
        hint = f"reward.memory_mb={self.limits.memory_mb} limits its address space; raise it for heavy imports"
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

    def _discard(self, worker: WorkerProcess) -> None:
        worker.kill()
        with self._lock:
            self._live.discard(worker)

    def _after_fork(self) -> None:
        """In a forked child: the workers belong to the parent, and a thread that is not here may hold the lock."""
        for worker in self._live:
            worker.release()
            worker.process.returncode = 0  # so that this process does not wait for it
        self._reset()


def _after_fork() -> None:
    for pool in list(_pools):
        pool._after_fork()


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)
