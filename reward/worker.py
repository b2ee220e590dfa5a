"""One process of `specrl.reward.pool.WorkerPool`, as the pool sees it; `reward/child.py` is what runs in it.

Requests and replies are JSON, one per line, over a socket: no pickle, so text from a model can never become code.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
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
                [sys.executable, "-P", "-m", "specrl.reward.child", json.dumps({**settings, "lifeline": lifeline})],
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
