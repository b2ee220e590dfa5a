"""Runs a program that a model wrote, and tests of it, each in a process of its own that is confined (`confined.py`)."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from specrl.reward import confined

SCRIPT = Path(confined.__file__)
GRACE_S = 5.0
"""Seconds after its deadline in which a process must have ended."""
MAX_LINE = 8 * confined.MAX_FILE


class NotConfinedError(RuntimeError):
    """The kernel refuses what confines a program; the message says what."""


class UnsupportedTestsError(ValueError):
    """The tests ask for something that cannot be asked of a program in another process; the message says what."""


@dataclass(frozen=True)
class Ran:
    """How a program ended."""

    code: int
    """Exit status; negative for a signal."""
    output: str
    """What it printed, up to `confined.MAX_FILE` bytes."""


class Confined:
    """One confined process, killed at the end of a `with` block with all that it started.

    Args:
        job: see `confined.py`.
        seconds: of wall clock, and about as many of processor time.
        memory_mb: address space of each of its processes; 0 is unlimited.
        peer: a socket to the other process; None if there is none.
    """

    def __init__(self, job: dict[str, Any], seconds: float, memory_mb: int, peer: socket.socket | None = None):
        self._seconds = seconds
        descriptor = peer.fileno() if peer else 2
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT), str(seconds), str(memory_mb), str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath, "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
            pass_fds=[descriptor],
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._lifeline = self._process.stdin
        self._verdict = self._process.stdout
        with suppress(BrokenPipeError):  # it may have ended and say why
            self._lifeline.write(json.dumps(job).encode() + b"\n")
            self._lifeline.flush()

    def __enter__(self) -> Confined:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):
            self._lifeline.close()  # it kills what it started and ends
        self._process.wait(GRACE_S)
        self._verdict.close()

    def lines(self) -> Iterator[bytes]:
        """The lines of its verdict as they come. Raises TimeoutError, NotConfinedError."""
        deadline = time.monotonic() + self._seconds + GRACE_S
        read = b""
        while select.select([self._verdict], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(self._verdict.fileno(), 2**16)
            *whole, read = (read + part).split(b"\n") if b"\n" in part else (read + part,)
            yield from whole
            if not part or len(read) > MAX_LINE:
                break
        code = self._process.wait(max(0.1, deadline - time.monotonic()))
        if code == confined.TOO_LONG:
            raise TimeoutError(f"the program ran for more than {self._seconds:g} s")
        if code == confined.NOT_CONFINED:
            raise NotConfinedError(read.decode(errors="replace"))


def runs(program: str, inputs: Sequence[str], *, seconds: float, memory_mb: int) -> Generator[Ran, None, None]:
    """Runs a Python program on one input after the other, all in `seconds`. Raises TimeoutError, NotConfinedError."""
    with Confined({"run": program, "inputs": [*inputs]}, seconds, memory_mb) as process:
        lines = process.lines()
        for _ in inputs:
            found = json.loads(next(lines, b'{"code": 1, "output": ""}'))
            yield Ran(found["code"], found["output"])


def run(program: str, stdin: str = "", *, seconds: float, memory_mb: int) -> Ran:
    """Runs a Python program that reads `stdin`. Raises TimeoutError, NotConfinedError."""
    (ran,) = runs(program, [stdin], seconds=seconds, memory_mb=memory_mb)
    return ran


def passes(program: str, tests: dict[str, Any], *, seconds: float, memory_mb: int) -> bool:
    """Whether a program passes tests that call it. They run in a process that the program cannot see.

    Args: tests: `source`, or `function` and `calls`, as UnitTests has them.

    Raises:
        TimeoutError, NotConfinedError: as `run`.
        UnsupportedTestsError: they say nothing about the program.
    """
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        Confined({"serve": program}, seconds + GRACE_S, memory_mb, peer=theirs),  # ends with the tests
        Confined({"judge": tests}, seconds, memory_mb, peer=ours) as judge,
    ):
        ours.close()  # so that one process sees the other's end
        theirs.close()
        verdict = next(judge.lines(), b"")
    if not verdict:
        return False  # out of memory, for example; the tests are those of the row, and what they got is the program's
    found = json.loads(verdict)
    if "unsupported" in found:
        raise UnsupportedTestsError(found["unsupported"])
    return found["passed"] is True


@cache
def missing() -> str:
    """What keeps programs from being confined here, as a sentence; empty if nothing does."""
    try:
        run("", seconds=10.0, memory_mb=0)
    except (NotConfinedError, OSError) as error:
        return (
            f"Programs of the code reward cannot be confined here, so they are not run: {error}. They need Linux that "
            "lets this user make namespaces; a container needs --cap-add SYS_ADMIN or --security-opt "
            "seccomp=unconfined."
        )
    return ""
