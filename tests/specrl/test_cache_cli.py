"""What `specrl.cache` says of a cache on disk, and that it changes nothing."""

import os

import pytest

from specrl.cache import CacheOptions, main
from specrl.config.load import run
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
from specrl.rollout.cache.snapshot import SNAPSHOT
from specrl.rollout.types import Trajectory


@pytest.fixture
def directory(tmp_path):
    cache = TrajectoryCache(Fingerprint({"tokenizer": "t1"}, {"temperature": "0.5"}), 100, [1])
    for index in range(8):
        cache.put("ex-1", index, Trajectory((50 + index, 7, 1), index, "stop", 3, index))
    cache.save(tmp_path / "trajectories", 9)
    return tmp_path


def command(*words):
    return run(main, words, CacheOptions)


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_sound_cache_is_described_by_its_run_or_its_own_directory(directory, capsys):
    for folder in (directory, directory / "trajectories"):
        assert command(f"run={folder}") == 0
        pairs = (line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
        lines = {name: value.strip() for name, value in pairs}
        assert lines["entries"] == "8, 0 malformed"
        assert lines["tokens"] == "24"
        assert lines["steps"] == "0 to 7"
        assert lines["saved at step"] == "9"
        assert lines["identity tokenizer"] == "t1"


def test_damage_is_named_and_nothing_is_changed(directory, capsys):
    path = directory / "trajectories" / SNAPSHOT
    flip(path, path.read_bytes().index((53).to_bytes(4, "little")))
    before = path.read_bytes()
    listing = sorted(os.listdir(path.parent))
    assert command(f"run={directory}") == 3
    assert f"'{path}' does not hold the rows that were written" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert sorted(os.listdir(path.parent)) == listing


def test_malformed_entries_are_named(tmp_path, capsys, monkeypatch):
    cache = TrajectoryCache(Fingerprint(), 100, [1])
    with monkeypatch.context() as patch:
        patch.setattr("specrl.rollout.cache.memory.complaint", lambda *_: None)
        cache.put("ex-1", 0, Trajectory((5, 100, 1), 0, "stop", 0, 0))
    cache.save(tmp_path, 0)
    assert command(f"run={tmp_path}") == 3
    output = capsys.readouterr().out
    assert "1, 1 malformed" in output
    assert "example 'ex-1', sample_index 0: token id 100 is outside 0..99\n" in output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "run is missing"),
        (["rnu=x"], 2, "Did you mean 'run'?"),
        (["run=no/such"], 2, "No run at no/such."),
        (["run=."], 3, "There is no trajectory cache in '.'"),
    ],
)
def test_mistakes_are_explained(capsys, monkeypatch, tmp_path, words, code, message):
    monkeypatch.chdir(tmp_path)
    assert command(*words) == code
    assert message in capsys.readouterr().err
