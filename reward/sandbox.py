"""Runs a program that a model wrote: in a directory of its own, with limits, and without network where Linux allows it.

Where the kernel lets this process create namespaces, the program has no network and sees no process but its own, and
all that it started ends with it. Elsewhere its process group is killed. The number of processes is limited except for
root, for whom Linux does not limit it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass

MAX_OUTPUT = 2**20
"""Bytes of a file that the program may write, its output among them; more ends it."""
MAX_PROCESSES = 32
NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000  # flags of unshare(2)
DIE_WITH_PARENT = 1  # option of prctl(2)


@dataclass(frozen=True)
class Ran:
    """How a program ended."""

    code: int
    """Exit status; negative for a signal."""
    output: str
    """What it printed, up to MAX_OUTPUT bytes."""


def run(program: str, stdin: str = "", *, seconds: float, memory_mb: int) -> Ran:
    """Runs a Python program that reads `stdin`.

    Args:
        seconds: of wall clock, and about as many of processor time.
        memory_mb: address space of each of its processes; 0 is unlimited.

    Raises:
        TimeoutError: it took longer.
    """
    with (
        tempfile.TemporaryDirectory(prefix="specrl-code-") as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
    ):
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        path = os.path.join(folder, "program.py")
        with open(path, "w", encoding="utf-8", errors="replace") as file:
            file.write(program)
        process = subprocess.Popen(
            [sys.executable, "-I", path],
            stdin=given,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
            start_new_session=True,
            preexec_fn=lambda: _confine(seconds, memory_mb),
        )
        ended = False
        try:
            ended = _wait(process.pid, seconds)
        finally:  # its process id is not given to another process before it is reaped
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not ended:
            raise TimeoutError(f"the program ran for more than {seconds:g} s")
        output.seek(0)
        return Ran(process.returncode, output.read(MAX_OUTPUT).decode(errors="replace"))


def _wait(pid: int, seconds: float) -> bool:
    """Whether a child ends within this time. It is not reaped."""
    handle = os.pidfd_open(pid)
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def _confine(seconds: float, memory_mb: int) -> None:
    """Runs in the new process, before the program."""
    libc = ctypes.CDLL(None, use_errno=True)
    user = 0 if os.geteuid() == 0 else NEW_USER
    if libc.unshare(user | NEW_PID | NEW_NET) == 0:
        _become_first_process(libc)
    elif libc.unshare(NEW_USER | NEW_NET) != 0:
        libc.unshare(NEW_NET)
    whole_s = int(seconds) + 1
    limits = {
        resource.RLIMIT_CPU: whole_s,
        resource.RLIMIT_FSIZE: MAX_OUTPUT,
        resource.RLIMIT_NPROC: MAX_PROCESSES,
        resource.RLIMIT_CORE: 0,
    }
    if memory_mb:
        limits[resource.RLIMIT_AS] = memory_mb * 2**20
    for name, limit in limits.items():
        _, hard = resource.getrlimit(name)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(name, (limit, limit))


def _become_first_process(libc: ctypes.CDLL) -> None:
    """The rest runs as process 1 of the new namespace, with whose end the kernel ends all its processes.

    The process that the pool knows waits for it, and passes its exit status on.
    """
    child = os.fork()
    if child:
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
