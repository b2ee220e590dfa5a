"""Runs a program that a model wrote, or tests of one, confined by Linux namespaces; `sandbox.py` starts it as a script.

The process that is started makes the namespaces, forks, and waits: for the program, the deadline, or the end of the
process that started it. Then it kills process 1 of the namespace, with which the kernel ends all its processes. They
cannot see this process. They get

- a root directory of their own, with /usr and the interpreter, read-only, and an empty /tmp, where they run;
- process ids and a /proc of their own, and no network;
- a user id that nothing else has where root started it, no privileges, and limits.

A job is a line of JSON from the standard input, whose end ends the process. It is one of
{"run": source, "inputs": [text]}: the source is run as a script on each input, each time in a process of its own, and
how each one ended and what it printed is written to the standard output, a line of JSON for each;
{"serve": source}: the source is loaded as a module, and descriptor PEER asks for its functions, see `remote.py`;
{"judge": ...}: tests ask PEER, and their verdict is written to the standard output, see `judge.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import types
from collections.abc import Iterator, Mapping
from importlib.machinery import SourceFileLoader
from typing import Any

LIFELINE, VERDICT, PEER = (os.dup(0), os.dup(1), int(sys.argv[3])) if __name__ == "__main__" else (0, 0, 0)
"""Descriptors: the standard input and output that this process was started with, and a socket to another process.
VERDICT is also told why the kernel refuses something."""
TOO_LONG, NOT_CONFINED = 124, 125
"""Exit statuses: the deadline passed; the kernel refused a namespace."""
FIRST_USER = 1_700_000_000
"""User ids from here on belong to nobody; each program has one of its own, so that its processes can be counted."""
MAX_PROCESSES = 32
MAX_FILE = 2**24
"""Bytes of a file that the program may write, its output among them."""
TEMPORARY = b"size=67108864,mode=1777"
NEW_MOUNTS, NEW_USER, NEW_PIDS, NEW_NETWORK, NEW_IPC = 0x20000, 0x10000000, 0x20000000, 0x40000000, 0x8000000
READ_ONLY, NO_SETUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE, DETACH = 1, 2, 4, 32, 4096, 16384, 1 << 18, 2
DUMPABLE, NO_NEW_PRIVILEGES, DROP_BOUNDING, LAST_CAPABILITY = 4, 38, 24, 63
SYSTEM = "/usr", "/lib", "/lib64", "/bin"
DEVICES = "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"

libc = ctypes.CDLL(None, use_errno=True)


def confine(job: dict[str, Any], seconds: float, memory_mb: int) -> int:
    """Runs the job in a confined child; the program's exit status, or one of those above."""
    user = os.geteuid()
    group = os.getegid()
    kept = FIRST_USER + int.from_bytes(os.urandom(3), "big") if user == 0 else user
    try:
        if user == 0:
            os.setgroups([])
        kinds = NEW_USER | NEW_MOUNTS | NEW_PIDS | NEW_NETWORK | NEW_IPC
        with mapping({user, kept}, {group, kept} if user == 0 else {group}):
            checked(libc.unshare(kinds), "unshare")
    except OSError as error:
        os.write(VERDICT, f"{error}".encode())
        return NOT_CONFINED
    refused, telling = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(refused)
        os.close(LIFELINE)
        inside(job, telling, kept, seconds, memory_mb)
    os.close(telling)
    return waited(first, refused, seconds)


@contextlib.contextmanager
def mapping(users: set[int], groups: set[int]) -> Iterator[None]:
    """Maps users and groups to themselves in the user namespace that this process enters in the `with` block.

    Another process does it: only one of the outer namespace may map more than the user itself.
    """
    mine = os.getpid()
    waiting, entered = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        os.close(entered)
        status = 1
        with contextlib.suppress(OSError):
            if os.read(waiting, 1):
                write(f"/proc/{mine}/setgroups", "deny")
                write(f"/proc/{mine}/uid_map", "".join(f"{user} {user} 1\n" for user in users))
                write(f"/proc/{mine}/gid_map", "".join(f"{group} {group} 1\n" for group in groups))
                status = 0
        os._exit(status)
    os.close(waiting)
    try:
        yield
        os.write(entered, b"x")
    finally:
        os.close(entered)
        status = os.waitpid(mapper, 0)[1]
    if status:
        raise OSError("the user cannot be mapped into a user namespace")


def waited(first: int, refused: int, seconds: float) -> int:
    """Waits for process 1 of the namespace and kills it at the deadline, or when the starter is gone."""
    handle = os.pidfd_open(first)
    ready = select.select([handle, LIFELINE], [], [], seconds)[0]
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    status = os.waitpid(first, 0)[1]
    if reason := os.read(refused, 1000):
        os.write(VERDICT, reason)
        return NOT_CONFINED
    if handle not in ready:
        return TOO_LONG
    code = os.waitstatus_to_exitcode(status) & 0xFF
    return 1 if code in (TOO_LONG, NOT_CONFINED) else code  # a program's own status is neither


def inside(job: dict[str, Any], telling: int, user: int, seconds: float, memory_mb: int) -> None:
    """Process 1 of the namespace: confines itself and runs the job. It does not return."""
    try:
        own_root()
        drop_privileges(user)
    except OSError as error:
        os.write(telling, f"{error}".encode())
        os._exit(NOT_CONFINED)
    os.close(telling)
    cpu_s = int(seconds) + 1
    more = {resource.RLIMIT_CPU: cpu_s, resource.RLIMIT_FSIZE: MAX_FILE, resource.RLIMIT_NPROC: MAX_PROCESSES}
    limit(memory_mb, more)
    try:
        status = do(job)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # of the program; nobody reads its traceback
        status = 1
    sys.exit(status)


def own_root() -> None:
    """Makes a root directory of the system's and the interpreter's files, and changes to its /tmp."""
    base = "/tmp" if os.path.isdir("/tmp") else "/"
    mount(None, "/", None, RECURSIVE | PRIVATE)
    wanted = [*SYSTEM, sys.prefix, sys.base_prefix, *(path for path in sys.path if os.path.isdir(path)), *DEVICES]
    # A path through links is there by its names and where they lead.
    paths = dict.fromkeys(each for path in wanted if os.path.exists(path) for each in (os.path.realpath(path), path))
    sources = {path: os.open(path, os.O_PATH) for path in paths}
    mount("tmpfs", base, "tmpfs", NO_SETUID | NO_DEVICES, b"size=1048576,mode=755")
    for path in ("/proc", "/tmp", "/dev/shm"):
        os.makedirs(base + path, exist_ok=True)
    try:
        mount("proc", f"{base}/proc", "proc", NO_SETUID | NO_DEVICES)
        write(f"{base}/proc/sys/user/max_user_namespaces", "0")  # with one, a program could mount more memory
    except OSError:  # in a container that hides parts of /proc; the program has none then
        mount("tmpfs", f"{base}/proc", "tmpfs", READ_ONLY)
    for path in ("/tmp", "/dev/shm"):
        mount("tmpfs", base + path, "tmpfs", NO_SETUID | NO_DEVICES, TEMPORARY)
    bound: list[str] = []
    for path, source in sources.items():
        inner = base + path
        if not any(path == done or path.startswith(f"{done}/") for done in bound):
            place(f"/proc/self/fd/{source}", inner)
            mount(f"/proc/self/fd/{source}", inner, None, BIND | RECURSIVE)
            if path not in DEVICES:
                read_only(inner)
            bound.append(path)
        os.close(source)
    read_only(base)
    os.chdir(base)
    checked(libc.pivot_root(b".", b"."), "pivot_root")  # the new root is over the old one, which is unmounted
    checked(libc.umount2(b".", DETACH), "umount2")
    os.chdir("/tmp")


def place(path: str, inner: str) -> None:
    """Makes the directory or file that a path is bound to."""
    if os.path.isdir(path):
        os.makedirs(inner, exist_ok=True)
        return
    os.makedirs(os.path.dirname(inner), exist_ok=True)
    write(inner, "")


def read_only(path: str) -> None:
    """Makes a mount read-only; a mount of a user namespace must keep the flags that are set."""
    mount(None, path, None, REMOUNT | BIND | READ_ONLY | os.statvfs(path).f_flag & 15)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: bytes | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    checked(libc.mount(*encoded, ctypes.c_ulong(flags), options), f"mount of {target}")


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def drop_privileges(user: int) -> None:
    """Gives up root and every capability, for good."""
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(DROP_BOUNDING, capability, 0, 0, 0)  # those that the kernel does not know are refused
    if user != os.geteuid():
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    checked(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    checked(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def limit(memory_mb: int, more: Mapping[int, int]) -> None:
    """Bounds the address space of this process, unless it is 0, and more; an inherited hard limit below one stays."""
    memory = {resource.RLIMIT_AS: memory_mb * 2**20} if memory_mb else {}
    for name, most in {resource.RLIMIT_CORE: 0, **memory, **more}.items():
        _, hard = resource.getrlimit(name)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(name, (value, value))


def checked(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def helpers(job: dict[str, Any]) -> None:
    """Imports what a job needs from beside this file, before the root changes."""
    for name in ("remote", "judge") if "judge" in job else ("remote",) if "serve" in job else ():
        sys.modules[name] = types.ModuleType(name)
        path = os.path.join(os.path.dirname(__file__), f"{name}.py")
        SourceFileLoader(name, path).exec_module(sys.modules[name])


def do(job: dict[str, Any]) -> int:
    """Does the job; returns the exit status."""
    if "judge" in job:
        from judge import judged  # type: ignore[import-not-found]
        from remote import Peer  # type: ignore[import-not-found]

        verdict = judged(job["judge"], Peer(PEER))
        with os.fdopen(VERDICT, "w") as out:
            print(json.dumps(verdict), file=out)
        return 0
    if "serve" in job:
        os.close(VERDICT)
        os.dup2(os.memfd_create("output"), 1)  # which nobody reads, and which is limited in size
    with open("program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(job["run"] if "run" in job else job["serve"])
    sys.argv = ["program.py"]
    sys.path.insert(0, "/tmp")
    if "run" in job:
        import runpy

        if fork_for_each(job["inputs"]):
            runpy.run_path("program.py", run_name="__main__")
        return 0
    from remote import serve

    serve(PEER)
    os._exit(0)  # nothing that the program leaves running matters any more


def fork_for_each(inputs: list[str]) -> bool:
    """Forks for each input. The new process gets True; this one waits for its end and writes down what it did."""
    libc.prctl(DUMPABLE, 0, 0, 0, 0)  # the program, which is of the same user, does not look into this process
    for text in inputs:
        files = [os.memfd_create(name) for name in ("input", "output")]
        os.write(files[0], text.encode(errors="replace"))
        os.lseek(files[0], 0, os.SEEK_SET)
        program = os.fork()
        if program == 0:
            os.close(VERDICT)
            libc.prctl(DUMPABLE, 1, 0, 0, 0)
            for descriptor, file in enumerate(files):
                os.dup2(file, descriptor)
                os.close(file)
            return True
        code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # what it started and left running
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        output = os.pread(files[1], MAX_FILE, 0).decode(errors="replace")
        for file in files:
            os.close(file)
        line = json.dumps({"code": code, "output": output}).encode() + b"\n"
        while line:
            line = line[os.write(VERDICT, line) :]
    return False


if __name__ == "__main__":
    with open(0, "rb", closefd=False) as channel, open(os.devnull, "r+b", buffering=0) as nothing:
        given = json.loads(channel.readline())
        for standard in (0, 1):
            os.dup2(nothing.fileno(), standard)
    helpers(given)
    raise SystemExit(confine(given, float(sys.argv[1]), int(sys.argv[2])))
