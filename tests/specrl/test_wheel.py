"""What is installed from a wheel is complete: an editable install would hide a forgotten file."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("specrl", "rollout", "reward", "trainers")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.slow
def test_the_wheel_holds_configs_and_the_tiny_policy(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    source, unpacked = tmp_path / "source", tmp_path / "unpacked"
    source.mkdir()
    wanted = [*PACKAGES, "configs", "pyproject.toml", "README.md", "LICENSE"]
    for name in wanted:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, source / name)
    command = ["-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet", "--wheel-dir"]
    subprocess.run([sys.executable, *command, tmp_path, source], check=True, timeout=300)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(unpacked)
    assert _names(unpacked / "specrl" / "configs", "*.yaml") == _names(ROOT / "configs", "*.yaml") != set()
    assert _names(unpacked / "specrl" / "assets" / "tiny") == _names(ROOT / "specrl" / "assets" / "tiny") != set()
    modules = {path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    installed = {Path("specrl") / path for path in modules if path.parts[0] != "specrl"}
    installed |= {path for path in modules if path.parts[0] == "specrl"}
    assert {path for path in installed if not (unpacked / path).exists()} == set()
    assert {path.name for path in unpacked.iterdir() if path.is_dir()} == {"specrl", f"specrl-{VERSION}.dist-info"}
    code = "from specrl.config import load as cli; print(cli.__file__); print(cli.load(['config=grpo_math']).name)"
    environment = {"PYTHONPATH": str(unpacked)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(unpacked / "specrl" / "config" / "load.py"), "grpo_math"], done.stderr


def _names(folder, pattern="*"):
    return {path.name for path in folder.glob(pattern) if path.is_file()}
