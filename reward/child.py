"""What runs in a process of `specrl.reward.pool.WorkerPool`, started as `python -m specrl.reward.child SETTINGS_JSON`.

Requests come over the socket handed in as stdin, see `reward/worker.py`. Replies are {"ready": true} once, then
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
import sys
import traceback
from collections.abc import Callable
from typing import Any


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
