"""The console script runs the commands, and names the nearest one for a typing error."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from specrl.__main__ import COMMANDS
from specrl.config.load import load


def specrl(*words, cwd=None):
    command = [sys.executable, "-m", "specrl", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_a_command_runs_with_its_words():
    done = specrl("train", "config=list")
    assert done.returncode == 0
    assert "grpo_math" in done.stdout


def test_an_unknown_command_names_the_nearest_one():
    done = specrl("trian", "config=grpo_math")
    assert done.returncode == 2
    assert "'train'" in done.stderr


@pytest.mark.parametrize("started", [["-m", "specrl.bench"], ["-m", "specrl.evaluate"], ["-m", "specrl", "bench"]])
def test_help_is_that_of_the_command(started):
    done = subprocess.run([sys.executable, *started, "help=true"], capture_output=True, text=True)
    assert done.stdout.startswith(f"usage: python -m specrl.{started[-1].removeprefix('specrl.')} ")


def test_every_command_is_listed():
    folder = Path(__file__).parents[2] / "specrl"
    modules = {file.stem for file in folder.glob("*.py") if '__name__ == "__main__"' in file.read_text()}
    packages = {file.parent.name for file in folder.glob("*/__main__.py")}
    assert (modules | packages) - {"__main__"} == set(COMMANDS)
    listed = re.findall(r"^python -m specrl\.(\w+) ", load(["help=true"]), re.MULTILINE)
    assert set(listed) == set(COMMANDS), "help=true lists them too"
