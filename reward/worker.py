"""One worker process of `WorkerPool`: the pool's handle on it, and the program that runs in it.

The pool starts `python -m specrl.reward.worker SETTINGS_JSON`. Requests and replies are JSON lines over a socket:
nothing is pickled, so that text from a model cannot become code in the trainer. The worker sends {"value": ...} or
{"error": text, "kind": ...} once it has loaded the handler, and then for each request; the kind is "timeout" (the
function raised TimeoutError), "memory" (the memory limit was reached) or "error".
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from specrl.reward.confined import limit

MAX_REPLY_BYTES = 2**20


class WorkerProcess:
    """The pool's handle on one process. Only `kill` is thread-safe: the pool lends a worker to one thread at a time."""

    def __init__(self, settings: dict[str, Any]):
        self.channel, worker_channel = socket.socketpair()
        lifeline, write_end = os.pipe()
        self.lifeline = os.fdopen(write_end, "wb", buffering=0)
        self.killed = False
        self._kill_lock = threading.Lock()
        # User modules resolve as they do here, and the fixed hash seed gives sets the same order in every worker.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "specrl.reward.worker", json.dumps({**settings, "lifeline": lifeline})],
                stdin=worker_channel.fileno(),
                stdout=2,  # what user code prints belongs in the log
                pass_fds=(lifeline,),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
            )
        except OSError:
            self.release()
            raise
        finally:
            worker_channel.close()
            os.close(lifeline)

    def ask(self, request: bytes, deadline: float) -> dict[str, Any]:
        """The reply to a request; an empty request waits for its first message.

        Raises TimeoutError at the deadline; EOFError, OSError or ValueError when the worker is broken.
        """
        self._set_timeout(deadline)
        self.channel.sendall(request)
        line = bytearray()
        while not line.endswith(b"\n"):
            self._set_timeout(deadline)
            chunk = self.channel.recv(65536)
            if not chunk:
                raise EOFError("the worker process ended without a reply")
            line += chunk
            if len(line) > MAX_REPLY_BYTES:
                raise ValueError(f"the worker's reply is larger than {MAX_REPLY_BYTES} bytes")
        return json.loads(line)

    def _set_timeout(self, deadline: float) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("deadline passed")
        self.channel.settimeout(remaining)

    def kill(self) -> None:
        """Kills and reaps the process with its children. Idempotent, and safe from any thread."""
        with self._kill_lock:
            if self.killed:
                return
            self.killed = True
            # The process id cannot be reused before the process is reaped, so this reaches only our process group.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=2.0)
            self.release()

    def release(self) -> None:
        """Closes this process's ends of the channels only, for a forked child, whose parent keeps the worker."""
        self.channel.close()
        self.lifeline.close()


def main() -> int:
    """The program of a worker."""
    settings = json.loads(sys.argv[1])
    die_with_parent(settings["lifeline"])
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as devnull:
        os.dup2(devnull.fileno(), 0)
    limit(settings["memory_mb"], {})
    handlers: list[Callable[[Any], Any]] = []
    reply = answer(lambda settings: handlers.append(make(settings)), sys.argv[1].encode())
    channel.sendall(json.dumps(reply).encode() + b"\n")
    if "error" in reply:
        return 1
    for request in channel.makefile("rb"):
        reply = answer(handlers[0], request)
        channel.sendall(json.dumps(reply).encode() + b"\n")
        if reply.get("kind") == "memory":  # the heap may be in any state, so the pool starts a new process
            return 1
    return 0


def make(settings: dict[str, Any]) -> Callable[[Any], Any]:
    """The handler that `target(*arguments)` of the settings makes."""
    module, _, factory = settings["target"].partition(":")
    return getattr(importlib.import_module(module), factory)(*settings["arguments"])


def die_with_parent(lifeline: int) -> None:
    """Lets the kernel kill this process group when the parent, which holds the other end of the pipe, is gone.

    A thread cannot do this, as C code such as a huge integer power never lets it run. A parent-death signal cannot
    either: Linux sends it already when the *thread* that started the worker ends.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    if hasattr(fcntl, "F_SETSIG"):  # Linux; elsewhere the default signal, SIGIO, ends the process too
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # the parent died before the signal was armed
        sys.exit(1)


def answer(handler: Callable[[Any], Any], request: bytes) -> dict[str, Any]:
    """Runs the handler on one request; whatever it raises, SystemExit included, becomes the reply."""
    try:
        value = handler(json.loads(request))
        json.dumps(value, allow_nan=False)  # raises where JSON cannot carry it
        return {"value": value}
    except BaseException as error:
        kinds = {"memory": MemoryError, "timeout": TimeoutError, "error": BaseException}
        kind = next(kind for kind, cls in kinds.items() if isinstance(error, cls))
        return {"error": traceback.format_exc(limit=-8), "kind": kind}


if __name__ == "__main__":
    sys.exit(main())
