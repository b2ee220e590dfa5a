"""What is installed from a wheel is complete: an editable install would hide a forgotten file."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = ("specrl", "rollout", "reward", "trainers")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in (*PACKAGES, "configs", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, source / name)
    command = ["-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet", "--wheel-dir"]
    subprocess.run([sys.executable, *command, folder, source], check=True, timeout=300)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_configs_and_the_tiny_policy(wheel, tmp_path):
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(unpacked)
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


@pytest.mark.long
def test_an_installed_wheel_trains_by_its_console_script(wheel, tmp_path):
    """In an environment that has specrl from the wheel only, in a directory with packages of the same names."""
    clean = tmp_path / "clean"
    subprocess.run([sys.executable, "-m", "venv", clean], check=True, timeout=120)
    subprocess.run([clean / "bin/pip", "install", "--no-deps", "--no-index", "--quiet", wheel], check=True, timeout=120)
    # dependencies from this environment; its own .pth files, such as that of an editable specrl, are not read
    (site,) = clean.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("rollout.py", "reward.py", "trainers.py", "configs.py"):
        (elsewhere / name).write_text("raise AssertionError('a file of the user')")
    words = ["train", "config=grpo_math", "dataset.train_size=4", "trainer.prompts_per_step=2", "trainer.max_steps=2"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [clean / "bin/specrl", *words]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = elsewhere / "outputs" / "grpo_math" / "report.md"
    assert report.read_text().startswith("# grpo_math")
    code = "import specrl; print(specrl.__file__)"
    where = subprocess.run([clean / "bin/python", "-c", code], cwd=elsewhere, capture_output=True, text=True)
    assert where.stdout.startswith(str(site))


ROLLOUT = """
import sys
from pathlib import Path
import specrl
from specrl.rollout.build import build_engine
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.types import Request
tiny = str(Path(specrl.__file__).parent / "assets" / "tiny")
engine = build_engine(EngineSpec(model=tiny, eos_ids=frozenset({1}), rollout=RolloutConfig()))
(done,), _ = engine.generate([Request([5, 6, 7], key=3, max_new_tokens=4)])
print(len(done.tokens), *(name for name in ("trl", "ray", "accelerate", "pytest") if name in sys.modules))
"""


@pytest.mark.long
def test_a_wheel_without_extras_rolls_out(wheel, tmp_path):
    """In an environment that has the wheel and what it requires, with what that requires in turn, and nothing else."""
    clean = tmp_path / "clean"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clean], check=True, timeout=120)
    (site,) = clean.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    required = _required(Distribution.at(site / f"specrl-{VERSION}.dist-info"))
    for name, distribution in required.items():
        tops = {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__")}
        assert tops, f"{name} has no files"
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    assert "trl" not in required
    assert "accelerate" not in required
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def rolled_out():
        command = [clean / "bin/python", "-c", ROLLOUT]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    done = rolled_out()
    assert done.stdout == "4\n", done.stderr
    (site / "psutil").unlink()
    assert "No module named 'psutil'" in rolled_out().stderr, "control: what is not declared is not there"


def _required(distribution):
    """The distributions that one requires without extras, and what these require, by name."""
    found, waiting = {}, [distribution]
    while waiting:
        for text in waiting.pop().requires or ():
            requirement = Requirement(text)
            if requirement.name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            found[requirement.name] = importlib.metadata.distribution(requirement.name)
            waiting.append(found[requirement.name])
    return found


def _names(folder, pattern="*"):
    return {path.name for path in folder.glob(pattern) if path.is_file()}
