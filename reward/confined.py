"""Runs one program that a model wrote, confined by Linux namespaces. `reward/sandbox.py` starts it as a script.

The process that is started makes the namespaces, forks, and waits: for the program, the deadline, or the end of the
process that started it, and then kills process 1 of the namespace, with which the kernel ends all its processes. The
program cannot see this process. It gets

- a root directory of its own, of /usr and the interpreter, read-only, and an empty /tmp, where it runs;
- process ids and a /proc of its own, and no network;
- a user id that nothing else has where root started it, no privileges, and limits.

A job is a line of JSON from descriptor JOB: `program`, its source, and `load`, for tests that call it. Then the
program is loaded as the module `solution`, LOADED is written to descriptor VERDICT, and only then does the other side
send a second line: `mark` and either `tests`, source that raises where the program is wrong, or `calls`. What they
found follows the mark on VERDICT.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

JOB, VERDICT, LIFELINE = map(int, sys.argv[3:6] if __name__ == "__main__" else "000")
"""Descriptors of this process, beside the program's input and output."""
LOADED = b"loaded\n"
TOO_LONG, NOT_CONFINED = 124, 125
"""Exit statuses: the deadline passed; the kernel refused a namespace, with the reason on VERDICT."""
FIRST_USER = 1_700_000_000
"""User ids from here on belong to nobody; each program has one of its own, so that its processes can be counted."""
MAX_PROCESSES = 32
MAX_FILE = 2**20
"""Bytes of a file that the program may write, its output among them."""
TEMPORARY = b"size=67108864,mode=1777"
NEW_MOUNTS, NEW_USER, NEW_PIDS, NEW_NETWORK, NEW_IPC = 0x20000, 0x10000000, 0x20000000, 0x40000000, 0x8000000
READ_ONLY, NO_SETUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE, DETACH = 1, 2, 4, 32, 4096, 16384, 1 << 18, 2
NO_NEW_PRIVILEGES, DROP_BOUNDING, LAST_CAPABILITY = 38, 24, 63
SYSTEM = "/usr", "/lib", "/lib64", "/bin"
DEVICES = "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"

libc = ctypes.CDLL(None, use_errno=True)


def confine(seconds: float, memory_mb: int) -> int:
    """Runs the job in a confined child; the program's exit status, or one of those above."""
    user = os.geteuid()
    group = os.getegid()
    try:
        kinds = NEW_MOUNTS | NEW_PIDS | NEW_NETWORK | NEW_IPC
        checked(libc.unshare(kinds if user == 0 else kinds | NEW_USER), "unshare")
        if user:
            become_myself(user, group)
    except OSError as error:
        os.write(VERDICT, f"{error}".encode())
        return NOT_CONFINED
    refused, telling = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(refused)
        os.close(LIFELINE)
        inside(telling, seconds, memory_mb)
    os.close(telling)
    return waited(first, refused, seconds)


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


def become_myself(user: int, group: int) -> None:
    """Maps the user to itself in the new user namespace, in which it is not root."""
    for file, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{file}", "w") as out:
            out.write(line)


def inside(telling: int, seconds: float, memory_mb: int) -> None:
    """Process 1 of the namespace: confines itself and runs the job. It does not return."""
    try:
        own_root()
        drop_privileges()
    except OSError as error:
        os.write(telling, f"{error}".encode())
        os._exit(NOT_CONFINED)
    os.close(telling)
    limit(seconds, memory_mb)
    try:
        status = job()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # of the program; nobody reads its traceback
        status = 1
    sys.exit(status)


def own_root() -> None:
    """Makes a root directory of the system's and the interpreter's files, and changes to its /tmp."""
    base = "/tmp" if os.path.isdir("/tmp") else "/"
    mount(None, "/", None, RECURSIVE | PRIVATE)
    mount("tmpfs", base, "tmpfs", NO_SETUID | NO_DEVICES, b"size=1048576,mode=755")
    wanted = [*SYSTEM, sys.prefix, sys.base_prefix, *(path for path in sys.path if os.path.isdir(path))]
    bound: list[str] = []
    paths = dict.fromkeys([*wanted, *DEVICES])  # once each: a descriptor left open leads to the old root
    sources = {path: os.open(path, os.O_PATH) for path in paths if os.path.exists(path)}
    for path, source in sources.items():
        inner = base + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(inner), exist_ok=True)
            os.symlink(os.readlink(path), inner)
        elif not any(path == done or path.startswith(done + "/") for done in bound):
            place(path, inner)
            mount(f"/proc/self/fd/{source}", inner, None, BIND | RECURSIVE)
            if path not in DEVICES:
                flags = os.statvfs(inner).f_flag & 15  # a mount of a user namespace must keep those that are set
                mount(None, inner, None, REMOUNT | BIND | READ_ONLY | flags)
            bound.append(path)
        os.close(source)
    for path in ("/proc", "/tmp"):
        os.makedirs(base + path, exist_ok=True)
    try:
        mount("proc", f"{base}/proc", "proc", NO_SETUID | NO_DEVICES)
    except OSError:  # in a container that hides parts of /proc; the program has none then
        mount("tmpfs", f"{base}/proc", "tmpfs", READ_ONLY)
    mount("tmpfs", f"{base}/tmp", "tmpfs", NO_SETUID | NO_DEVICES, TEMPORARY)
    os.chdir(base)
    checked(libc.pivot_root(b".", b"."), "pivot_root")  # the new root lies over the old one, which is unmounted
    checked(libc.umount2(b".", DETACH), "umount2")
    os.chdir("/tmp")


def place(path: str, inner: str) -> None:
    """Makes the directory or file that a path is bound to."""
    if os.path.isdir(path):
        os.makedirs(inner, exist_ok=True)
        return
    os.makedirs(os.path.dirname(inner), exist_ok=True)
    with open(inner, "w"):
        pass


def mount(source: str | None, target: str, kind: str | None, flags: int, options: bytes | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    checked(libc.mount(*encoded, ctypes.c_ulong(flags), options), f"mount of {target}")


def drop_privileges() -> None:
    """Gives up root and every capability, for good."""
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(DROP_BOUNDING, capability, 0, 0, 0)  # those that the kernel does not know are refused
    if os.geteuid() == 0:
        user = FIRST_USER + int.from_bytes(os.urandom(3), "big")
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    checked(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    checked(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def limit(seconds: float, memory_mb: int) -> None:
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_FSIZE: MAX_FILE,
        resource.RLIMIT_NPROC: MAX_PROCESSES,
        resource.RLIMIT_CORE: 0,
    }
    if memory_mb:
        limits[resource.RLIMIT_AS] = memory_mb * 2**20
    for name, most in limits.items():
        _, hard = resource.getrlimit(name)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(name, (value, value))


def checked(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


# The job ---------------------------------------------------------------------------------------------------------


def job() -> int:
    """Runs the program; its exit status, or 0 when its tests have been run."""
    channel = os.fdopen(JOB, "rb")
    given = json.loads(channel.readline())
    with open("program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(given["program"])
    sys.argv = ["program.py"]
    sys.path.insert(0, "/tmp")
    if not given["load"]:
        import runpy

        channel.close()
        os.close(VERDICT)
        runpy.run_path("program.py", run_name="__main__")
        return 0
    sound = dict(vars(builtins))
    exact = json.dumps
    solution = loaded()
    vars(builtins).update(sound)
    os.write(VERDICT, LOADED)
    asked = json.loads(channel.readline())
    found = called(solution, asked["calls"]) if "calls" in asked else tested(solution, asked["tests"], asked["entry"])
    written = asked["mark"] + exact(found)
    with os.fdopen(VERDICT, "w") as out:
        out.write(written)
    os._exit(0)  # nothing that the program leaves running matters any more


def loaded() -> ModuleType:
    """The program as the module `solution`."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("solution", "/tmp/program.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["solution"] = module
    spec.loader.exec_module(module)
    return module


def called(solution: ModuleType, calls: dict[str, Any]) -> list[Any]:
    """What the function returns for each list of arguments, as JSON types."""
    name = calls["name"]
    owner: Any = solution if hasattr(solution, name) else solution.Solution()
    return [getattr(owner, name)(*arguments) for arguments in calls["arguments"]]


def tested(solution: ModuleType, source: str, entry: str) -> bool:
    """Whether nothing raises: the tests' code, `check(entry)`, test functions, and methods of test classes."""
    import unittest

    names = dict(vars(solution), __name__="tests", _same=same_in(solution))
    tree = ast.fix_missing_locations(Equalities().visit(ast.parse(source)))
    exec(compile(tree, "tests", "exec"), names)  # the row's tests, confined like the program
    defined = {node.name: names[node.name] for node in tree.body if hasattr(node, "name")}
    if entry:
        names["check"](names[entry])
    for name, value in defined.items():
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            result = unittest.defaultTestLoader.loadTestsFromTestCase(value).run(unittest.TestResult())
            assert result.wasSuccessful()
        elif isinstance(value, type) and name.startswith("Test"):
            for method in [key for key in vars(value) if key.startswith("test")]:
                getattr(value(), method)()
        elif name.startswith("test") and callable(value):
            value()
    return True


class Equalities(ast.NodeTransformer):
    """Lets `a == b` and `self.assertEqual(a, b)` of the tests be decided by `_same(a, b)`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "assertEqual" and len(node.args) >= 2:
            node.func.attr = "assertTrue"
            node.args = [ast.Call(ast.Name("_same", ast.Load()), node.args[:2], [])]
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            return ast.Call(ast.Name("_same", ast.Load()), [node.left, *node.comparators], [])
        return node


def same_in(solution: ModuleType) -> Callable[[Any, Any], Any]:
    """Equality in which a value of a type that the program defines equals no value of another type."""

    def own(value: Any) -> bool:
        return type(value).__module__ == solution.__name__

    def same(a: Any, b: Any) -> Any:
        if (own(a) or own(b)) and type(a) is not type(b):
            return False
        if type(a) is type(b) and type(a) in (list, tuple):
            return len(a) == len(b) and all(map(same, a, b))
        if type(a) is type(b) is dict:
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        return a == b

    return same


if __name__ == "__main__":
    raise SystemExit(confine(float(sys.argv[1]), int(sys.argv[2])))
