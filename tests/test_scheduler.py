"""The scheduler: a file's tests share a process, and those of INDEPENDENT are spread."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HOOKS = "from tests.scheduler import pytest_collection_modifyitems, pytest_xdist_make_scheduler\n"
TESTS = """
import os, time
from pathlib import Path
import pytest

@pytest.mark.parametrize("i", range(4))
def test_it(i):
    time.sleep(0.1)
    with Path({out!r}).open("a") as out:
        out.write(Path(__file__).name + " " + str(os.getpid()) + chr(10))
"""


def processes(folder: Path, hooks: str) -> dict[str, int]:
    """The number of processes that ran each file's tests."""
    out = folder / "out.txt"
    out.unlink(missing_ok=True)
    (folder / "conftest.py").write_text(hooks)
    for name in ("test_a.py", "test_b.py", "test_scripts.py"):
        (folder / name).write_text(TESTS.format(out=str(out)))
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadscope"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*words, "--no-loadscope-reorder"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pairs = [line.split() for line in out.read_text().splitlines()]
    assert len(pairs) == 12
    return {name: len({pid for of, pid in pairs if of == name}) for name, _ in pairs}


@pytest.mark.slow
def test_a_file_has_a_process_and_independent_tests_have_all(tmp_path):
    pytest.importorskip("xdist", reason="needs pytest-xdist")
    assert processes(tmp_path, HOOKS) == {"test_a.py": 1, "test_b.py": 1, "test_scripts.py": 2}
    assert processes(tmp_path, "")["test_scripts.py"] == 1, "control: pytest-xdist's own"
