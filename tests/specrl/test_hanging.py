"""A test that hangs ends the tests with its name, instead of holding them for ever."""

import subprocess
import sys

from tests.runs import ROOT

HANGS = """
import threading

def test_before(): ...

def test_that_waits_for_ever():
    threading.Event().wait()
"""


def test_a_hanging_test_is_named(tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", str(file)]
    found = subprocess.run(
        [*command, "-o", "faulthandler_timeout=2", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert found.returncode != 0
    assert "test_that_waits_for_ever" in found.stderr + found.stdout
