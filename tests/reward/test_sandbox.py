"""Programs that try to leave the sandbox, started by root and by nobody; each succeeds without it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from specrl.reward import confined, sandbox
from specrl.reward.sandbox import run

LIMITS = {"seconds": 10.0, "memory_mb": 512}
NOBODY = 65534
linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is made of Linux namespaces")

# Each prints LEAK where it succeeds. SECRET is in the environment and FILE in the home of the process that scores.
ATTACKS = {
    "environment of another process": """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if pid != str(os.getpid()) and b"SECRET=" in open(f"/proc/{pid}/environ", "rb").read():
            print("LEAK")
    except OSError:
        pass
""",
    "memory of another process": """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if pid != str(os.getpid()):
            open(f"/proc/{pid}/mem", "r+b")
            print("LEAK")
    except OSError:
        pass
""",
    "its own environment": "import os\nprint('LEAK' if 'SECRET' in os.environ else '')",
    "a private file": "print('LEAK' if open(FILE).read() else '')",
    "the root directory that was": """
import os
os.open("/", os.O_RDONLY)
for fd in range(3, 64):
    try:
        top = os.open("../../../../../..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.stat(FILE.lstrip("/"), dir_fd=top)
        print("LEAK")
    except OSError:
        pass
""",
    "more memory for files": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000) == 0 and libc.unshare(0x20000) == 0:
    print("LEAK")
""",
    "the root directory": "open('/here', 'w')\nprint('LEAK')",
    "files of the interpreter": "import os\nopen(os.__file__, 'r+')\nprint('LEAK')",
    "privileges": """
import ctypes, os
libc = ctypes.CDLL(None)
if os.getuid() == 0 or libc.setuid(0) == 0 or libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
    print("LEAK")
""",
    "the network": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 2)\nprint('LEAK')",
    "signals to others": "import os, signal\nos.kill(STARTER, 0)\nprint('LEAK')",
}
# Asked to print how many processes it could start, and to leave one that nothing on the way ends.
FORKS = """
import os, time
started = 0
try:
    while started < 200:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        started += 1
except OSError:
    pass
print(started, flush=True)
"""
OUTLIVES = """
import ctypes, os, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sleep", ["sleep", MARK])
time.sleep(60)
"""
SCRIPT = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from specrl.reward.sandbox import run
def tried(program):
    try:
        return run(program, seconds=float(sys.argv[2]), memory_mb=512).output
    except TimeoutError:
        return "too long"
print(json.dumps([tried(program) for program in json.load(sys.stdin)]))
"""


def interpreter_of(user: int) -> str:
    """An interpreter that a user may run."""
    for path in (sys.executable, "/usr/bin/python3"):
        try:
            if subprocess.run([path, "-c", ""], user=user, group=user, extra_groups=[]).returncode == 0:
                return path
        except OSError:
            continue
    reason = f"no interpreter that user {user} may run"
    print(reason)
    pytest.skip(reason)


@pytest.fixture(params=["as it is", "nobody"])
def outcomes(request, monkeypatch):
    """What programs print that this user's sandbox runs."""
    monkeypatch.setenv("SECRET", "secret")
    if request.param == "as it is":
        user, interpreter = os.geteuid(), sys.executable
    elif os.geteuid() != 0:
        pytest.skip("only root can become nobody; the other case is not root")
    else:
        user, interpreter = NOBODY, interpreter_of(NOBODY)
    folder = Path(tempfile.mkdtemp())
    package = folder / "specrl" / "reward"
    package.mkdir(parents=True)
    for source in (Path(sandbox.__file__), Path(confined.__file__)):
        shutil.copy(source, package)
    for made in (package / "__init__.py", package.parent / "__init__.py"):
        made.touch()
    private = folder / "private"
    private.write_text("secret")
    if user != os.geteuid():
        os.chown(private, user, user)
    private.chmod(0o600)
    folder.chmod(0o755)

    def tried(*programs: str, seconds: float = 10.0, start=(interpreter, "-c", SCRIPT, str(folder))) -> list[str]:
        given = [program.replace("FILE", repr(str(private))) for program in programs]
        done = subprocess.run([*start, str(seconds)], input=json.dumps(given), capture_output=True, text=True,
                              user=user, group=user, extra_groups=[])  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    yield tried
    shutil.rmtree(folder)


@linux
@pytest.mark.slow
def test_no_attack_succeeds(outcomes):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, starter = str(server.getsockname()[1]), str(os.getpid())
        programs = [program.replace("PORT", port).replace("STARTER", starter) for program in ATTACKS.values()]
        assert dict(zip(ATTACKS, outcomes(*programs), strict=True)) == dict.fromkeys(ATTACKS, "") | {
            "its own environment": "\n",
        }


@linux
@pytest.mark.skipif(os.geteuid() != 0, reason="as root every attack succeeds without the sandbox")
def test_planted_fault_without_the_sandbox_every_attack_succeeds(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "secret")
    (tmp_path / "f").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server, subprocess.Popen(["sleep", "60"]) as neighbour:
        for name, program in ATTACKS.items():
            for word, value in (("FILE", repr(str(tmp_path / "f"))), ("PORT", str(server.getsockname()[1]))):
                program = program.replace(word, value)
            program = program.replace("STARTER", str(os.getpid())).replace('libc.mount(b"none"', 'int(b"0"')
            program = program.replace("'/here'", repr(str(tmp_path / "here")))
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
            assert "LEAK" in done.stdout, (name, done.stderr)
        neighbour.kill()


@linux
@pytest.mark.slow
def test_processes_are_bounded_and_end_with_the_program(outcomes):
    mark = f"{4000 + os.getpid()}.125"
    began = time.monotonic()
    started, late = outcomes(FORKS, OUTLIVES.replace("MARK", repr(mark)), seconds=2.0)
    assert 0 < int(started) <= confined.MAX_PROCESSES
    assert late == "too long"
    assert time.monotonic() - began < 30
    commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert mark not in commands


@linux
@pytest.mark.slow
def test_a_program_ends_with_the_process_that_scores():
    mark = f"{4000 + os.getpid()}.375"
    code = (
        f"from specrl.reward.sandbox import run\nrun({OUTLIVES.replace('MARK', repr(mark))!r}, seconds=60, memory_mb=0)"
    )
    scorer = subprocess.Popen([sys.executable, "-c", code])

    def alive() -> bool:
        return f"sleep {mark}" in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout

    def within_30_s(due: bool) -> bool:
        deadline = time.monotonic() + 30
        while alive() != due and time.monotonic() < deadline:
            time.sleep(0.05)
        return alive() == due

    assert within_30_s(True)
    scorer.kill()
    scorer.wait()
    assert within_30_s(False)


@linux
@pytest.mark.slow
def test_an_interpreter_behind_links_has_its_packages(tmp_path):
    (tmp_path / "first").symlink_to(sys.prefix)
    (tmp_path / "venv").symlink_to("first")
    program = "import numpy\nprint(numpy.arange(3).sum())"
    code = f"from specrl.reward.sandbox import run\nprint(run({program!r}, seconds=20, memory_mb=0))"
    done = subprocess.run([tmp_path / "venv" / "bin" / "python", "-c", code], capture_output=True, text=True)
    assert "output='3\\n'" in done.stdout, done.stderr


@linux
def test_what_the_kernel_refuses_is_said(monkeypatch):
    assert sandbox.missing() == ""
    planted = Path(tempfile.mkdtemp()) / "confined.py"
    planted.write_text(Path(confined.__file__).read_text().replace("libc.unshare(kinds", "libc.unshare(-1 | kinds"))
    monkeypatch.setattr(sandbox, "SCRIPT", planted)
    sandbox.missing.cache_clear()
    try:
        assert "cannot be confined here, so they are not run: [Errno 22] unshare" in sandbox.missing()
    finally:
        sandbox.missing.cache_clear()


@linux
@pytest.mark.slow
def test_a_program_has_its_own_directory_and_bounded_output():
    ran = run(
        "import os\nprint(os.getcwd(), os.listdir('.'), os.listdir('/home') if os.path.isdir('/home') else [])",
        **LIMITS,
    )
    assert (ran.code, ran.output) == (0, "/tmp ['program.py'] []\n")
    assert len(run("print('x' * 10**8)", **LIMITS).output) <= confined.MAX_FILE
    assert run("import numpy\nprint(numpy.arange(3).sum())", seconds=20, memory_mb=2048).output == "3\n"
