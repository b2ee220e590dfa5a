"""Everything is imported as `specrl.*`, so a user's own modules of the folders' names do not matter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def start(folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def folder(tmp_path):
    """A user's directory with modules of the same names as specrl's folders."""
    (tmp_path / "trainers").mkdir()
    for name in ("trainers/__init__.py", "reward.py", "rollout.py", "configs.py"):
        (tmp_path / name).write_text("raise SystemExit('the user module was imported')")
    return tmp_path


@pytest.mark.parametrize("words", [("specrl.train", "help=true"), ("specrl.train", "config=list"), ("specrl.env",)])
def test_commands_ignore_modules_of_the_same_names(folder, words):
    done = start(folder, "-m", *words)
    assert done.returncode == 0, done.stderr


def test_a_script_ignores_modules_of_the_same_names(folder):
    code = "import specrl\nprint(specrl.RolloutConfig.__module__, specrl.build_engine.__module__)"
    (folder / "script.py").write_text(code)
    done = start(folder, str(folder / "script.py"))
    assert (done.returncode, done.stdout) == (0, "specrl.rollout.config specrl.rollout.build\n"), done.stderr
