"""Runs a program that a model wrote, in a process of its own that is confined; see `reward/confined.py`."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

from specrl.reward import confined

SCRIPT = Path(confined.__file__)
GRACE_S = 5.0
"""Seconds after its deadline in which a program must have ended."""
MAX_VERDICT = 2**22


class NotConfinedError(RuntimeError):
    """The kernel refuses what confines a program; the message says what."""


@dataclass(frozen=True)
class Ran:
    """How a program ended."""

    code: int
    """Exit status; 128 and more for a signal."""
    output: str
    """What it printed, up to `confined.MAX_FILE` bytes."""
    found: Any = None
    """What the tests or calls found; None if they did not come to their end."""


def run(program: str, stdin: str = "", *, seconds: float, memory_mb: int, asked: dict[str, Any] | None = None) -> Ran:
    """Runs a Python program that reads `stdin`, or loads it and asks it what `asked` says.

    Args:
        seconds: of wall clock, and about as many of processor time.
        memory_mb: address space of each of its processes; 0 is unlimited.
        asked: {"tests": source, "entry": name of the function that `check` gets, or ""} or {"calls": {"name": of a
            function, "arguments": list of lists}}. The program is loaded before it can reach them.

    Raises:
        TimeoutError: it took longer.
        NotConfinedError: it was not run.
    """
    mark = token_hex(16)
    lines = [{"program": program, "load": asked is not None}]
    if asked is not None:
        lines.append({**asked, "mark": mark})
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        code, verdict = _started(given, output, lines, seconds, memory_mb)
        output.seek(0)
        printed = output.read(confined.MAX_FILE).decode(errors="replace")
    if code == confined.TOO_LONG:
        raise TimeoutError(f"the program ran for more than {seconds:g} s")
    if code == confined.NOT_CONFINED:
        raise NotConfinedError(verdict.decode(errors="replace"))
    return Ran(code, printed, _found(verdict, mark))


def _started(
    given: IO[bytes], output: IO[bytes], lines: list[dict[str, Any]], seconds: float, memory_mb: int
) -> tuple[int, bytes]:
    """Starts the script and talks to it; its exit status, and what it wrote on VERDICT."""
    with ExitStack() as pipes:
        ours, theirs = {}, {}
        for name, we_write in (("job", True), ("verdict", False), ("lifeline", True)):
            reading, writing = (
                pipes.enter_context(os.fdopen(end, mode, 0)) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True)
            )
            ours[name] = writing if we_write else reading
            theirs[name] = reading if we_write else writing
        numbers = [end.fileno() for end in theirs.values()]
        process = subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT), str(seconds), str(memory_mb), *map(str, numbers)],
            stdin=given,
            stdout=output,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath, "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
            pass_fds=numbers,
            start_new_session=True,
        )
        for end in theirs.values():
            end.close()
        try:
            verdict = _talked(ours["job"], ours["verdict"], lines, time.monotonic() + seconds + GRACE_S)
            ours["job"].close()
            return process.wait(GRACE_S + seconds), verdict
        finally:
            ours["lifeline"].close()  # the script kills what it started and ends
            process.wait(GRACE_S)


def _talked(job: IO[bytes], verdict: IO[bytes], lines: list[dict[str, Any]], deadline: float) -> bytes:
    """Sends the first line, the second once the program is loaded, and returns what is written on VERDICT."""
    waiting = [json.dumps(line).encode() + b"\n" for line in lines]
    received = b""
    with suppress(BrokenPipeError):  # the script has ended and says why
        job.write(waiting.pop(0))
    while select.select([verdict], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(verdict.fileno(), 65536)
        received += part
        if not part or len(received) > MAX_VERDICT:
            break
        if waiting and len(received) >= len(confined.LOADED):
            if received != confined.LOADED:  # the program writes there too
                break
            with suppress(BrokenPipeError):
                job.write(waiting.pop(0))
    return received


def _found(verdict: bytes, mark: str) -> Any:
    """What follows the mark on VERDICT; None if nothing does."""
    before, marked, found = verdict.partition(mark.encode())
    if before != confined.LOADED or not marked:
        return None
    try:
        return json.loads(found)
    except ValueError:
        return None


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
