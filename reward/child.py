"""One process of `reward.pool.WorkerPool`: as the pool sees it, and what runs in it.

It is started as `python -m reward.child SETTINGS_JSON`. Requests and replies are JSON, one per line, over the socket
handed in as stdin: no pickle, so text from a model can never become code. Replies are {"ready": true} once, then
{"value": ...} or {"error": text, "kind": ...} per request with kind "timeout" (the function raised TimeoutError),
"memory" (the memory limit was hit) or "error".
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import resource
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

MAX_REPLY_BYTES = 2**20


class WorkerProcess:
    """One process. Not thread-safe except `kill`: the pool hands a worker to one thread at a time."""

    def __init__(self, settings: dict[str, Any]):
        self.channel, theirs = socket.socketpair()
        lifeline, held = os.pipe()
        self.lifeline = os.fdopen(held, "wb", buffering=0)
        self.killed = False
        self._kill_lock = threading.Lock()
        # The same import path as here, so that user modules resolve alike; a fixed hash seed, so that set order does.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "reward.child", json.dumps({**settings, "lifeline": lifeline})],
                stdin=theirs,
                stdout=2,  # what user code prints belongs to the log
                pass_fds=(lifeline,),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
            )
        except OSError:
            self.abandon()
            raise
        finally:
            theirs.close()
            os.close(lifeline)

    def healthy(self) -> bool:
        """Between requests a living worker is silent; a readable socket means that it died or talks out of turn."""
        poll = select.poll()  # select() cannot watch descriptors from 1024 up
        poll.register(self.channel, select.POLLIN)
        return not poll.poll(0)

    def ask(self, request: bytes, deadline: float) -> dict[str, Any]:
        """The reply to a request, or to being started, for which the request is empty.

        Raises TimeoutError at the deadline; EOFError, OSError or ValueError when the worker is broken.
        """
        self._wait_until(deadline)
        self.channel.sendall(request)
        line = bytearray()
        while not line.endswith(b"\n"):
            self._wait_until(deadline)
            chunk = self.channel.recv(65536)
            if not chunk:
                raise EOFError("the worker process ended without a reply")
            line += chunk
            if len(line) > MAX_REPLY_BYTES:
                raise ValueError(f"the worker's reply is larger than {MAX_REPLY_BYTES} bytes")
        return json.loads(line)

    def _wait_until(self, deadline: float) -> None:
        if (remaining := deadline - time.monotonic()) <= 0:
            raise TimeoutError("deadline passed")
        self.channel.settimeout(remaining)

    def kill(self) -> None:
        """SIGKILL the process group, reap the leader, close our ends. Idempotent, from any thread."""
        with self._kill_lock:
            if self.killed:
                return
            self.killed = True
            # Before the leader is reaped its id cannot be reused, so this can only reach our own group.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=2.0)
            self.abandon()

    def ending(self) -> str:
        """How the process ended, once it was killed or died."""
        code = self.process.returncode
        return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def abandon(self) -> None:
        """Close our ends only: what a forked child does with its parent's workers."""
        self.channel.close()
        self.lifeline.close()


def die_with(lifeline: int) -> None:
    """Have the kernel kill this process group when the parent, holding the other end of pipe `lifeline`, is gone.

    A thread or a parent-death signal would not do: C code such as a huge integer power never lets another thread
    run, and Linux sends the parent-death signal already when the *thread* that started the worker ends.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    if hasattr(fcntl, "F_SETSIG"):  # Linux; elsewhere the default signal, SIGIO, ends the process too
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it died before the signal was armed
        sys.exit(1)


def limit_memory(megabytes: int) -> None:
    """Bound the address space of this process; a request above an inherited hard limit keeps the inherited one."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if megabytes <= 0:
        return
    wanted = megabytes * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, wanted))


def answer(handler: Callable[[Any], Any], request: bytes) -> dict[str, Any]:
    """Run the handler on one request; whatever it raises, SystemExit included, becomes the reply."""
    try:
        return {"value": handler(json.loads(request))}
    except BaseException as error:
        kind = "error"
        if isinstance(error, MemoryError):
            kind = "memory"
        elif isinstance(error, TimeoutError):
            kind = "timeout"
        return {"error": traceback.format_exc(limit=-8), "kind": kind}


def encode(reply: dict[str, Any]) -> bytes:
    """One JSON line; a value JSON cannot carry is an error reply."""
    try:
        return json.dumps(reply, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        text = f"the function returned {type(reply['value']).__name__}, which JSON cannot carry: {error}"
        return json.dumps({"error": text, "kind": "error"}).encode() + b"\n"


def main() -> int:
    settings = json.loads(sys.argv[1])
    die_with(settings["lifeline"])
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    limit_memory(settings["memory_mb"])
    try:
        module, _, factory = settings["target"].partition(":")
        handler = getattr(importlib.import_module(module), factory)(*settings["arguments"])
    except BaseException:
        channel.sendall(encode({"error": traceback.format_exc(limit=-8), "kind": "error"}))
        return 1
    channel.sendall(encode({"ready": True}))
    for request in channel.makefile("rb"):
        reply = answer(handler, request)
        channel.sendall(encode(reply))
        if reply.get("kind") == "memory":  # the heap may be in any state: the pool starts a fresh process
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
