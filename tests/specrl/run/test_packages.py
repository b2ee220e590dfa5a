"""The four packages come from one place, or every command says so before it imports a stranger."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specrl.run.packages import PACKAGES, mixed_roots, package_directories

ROOT = Path(__file__).parents[3]


def test_one_root_is_silent_and_two_are_told():
    one = {name: Path("/a") / name for name in PACKAGES}
    assert mixed_roots(one) == ""
    told = mixed_roots(one | {"rollout": Path("/b/rollout"), "reward": None})
    assert "specrl from /a, but `rollout` from /b, `reward` from nowhere. Start in another directory" in told
    assert "\n" not in told


def test_the_four_packages_come_from_here():
    assert package_directories() == {name: ROOT / name for name in PACKAGES}


def start(module, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, "help=true"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", ["specrl.train", "specrl.report", "specrl.cache"])
def test_a_package_of_that_name_where_a_command_starts_is_told(module, tmp_path):
    (tmp_path / "trainers").mkdir()
    assert start(module, tmp_path).returncode == 0, "a directory without code is no package"
    (tmp_path / "trainers" / "__init__.py").write_text("raise SystemExit('a stranger was imported')")
    (tmp_path / "reward.py").write_text("raise SystemExit('a stranger was imported')")
    done = start(module, tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: the packages come from different places: specrl from ")
    assert f"`reward` from {tmp_path}, `trainers` from {tmp_path}. Start in another directory or rename" in done.stderr


def test_the_environment_report_works_beside_strangers(tmp_path):
    (tmp_path / "reward.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "specrl.env"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "warning: the packages come from different places: " in done.stdout


def test_a_script_of_a_user_may_have_a_package_of_that_name(tmp_path):
    (tmp_path / "reward.py").touch()
    (tmp_path / "script.py").write_text("import specrl; print(specrl.RolloutConfig.__name__)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "RolloutConfig\n"), done.stderr
