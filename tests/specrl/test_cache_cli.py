import os
import subprocess
import sys

import pytest

from specrl.cache import main
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
from specrl.rollout.cache.snapshot import SNAPSHOT
from specrl.rollout.types import Trajectory


@pytest.fixture
def directory(tmp_path):
    cache = TrajectoryCache(Fingerprint({"tokenizer": "t1"}, {"temperature": "0.5"}), 100, [1])
    for sample_index in range(8):
        cache.put(
            "ex-1",
            sample_index,
            Trajectory(
                (50 + sample_index, 7, 1), sample_index, "stop", 3, sample_index, 1.0 if sample_index < 5 else None
            ),
        )
    cache.save(tmp_path, 9)
    return tmp_path


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_verify_an_intact_cache(directory, capsys):
    assert main(["verify", f"run={directory}"]) == 0
    assert capsys.readouterr().out == "8 entries: 8 good, 0 malformed\n"


def test_verify_names_damage_and_changes_nothing(directory, capsys):
    path = directory / SNAPSHOT
    flip(path, path.read_bytes().index((53).to_bytes(4, "little")))
    before = path.read_bytes()
    assert main(["verify", f"run={directory}"]) == 3
    assert f"'{path}' does not hold the rows that were written" in capsys.readouterr().err
    assert path.read_bytes() == before
    flip(path, len(before) - 1)
    listing = os.listdir(directory)
    assert main(["verify", f"run={directory}"]) == 3
    assert "is not a readable parquet file" in capsys.readouterr().err
    assert os.listdir(directory) == listing


def test_verify_names_malformed_entries(tmp_path, capsys, monkeypatch):
    cache = TrajectoryCache(Fingerprint(), 100, [1])
    with monkeypatch.context() as patch:
        patch.setattr("specrl.rollout.cache.memory.complaint", lambda *_: None)
        cache.put("ex-1", 0, Trajectory((5, 100, 1), 0, "stop", 0, 0))
    cache.save(tmp_path, 0)
    assert main(["verify", f"run={tmp_path}"]) == 3
    out = capsys.readouterr().out
    assert "example 'ex-1', sample_index 0: token id 100 is outside 0..99\n" in out
    assert "1 entries: 0 good, 1 malformed\n" in out


def test_info(directory, capsys):
    assert main(["info", f"run={directory}"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    lines = {name: value.strip() for name, value in lines.items()}
    assert lines["entries"] == "8, 1 examples"
    assert lines["tokens"] == "24"
    assert lines["steps"] == "0 to 7"
    assert lines["saved at step"] == "9"
    assert lines["with reward"] == "5"
    assert lines["identity tokenizer"] == "t1"
    assert lines["sampling temperature"] == "0.5"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "Unknown command ''. usage: python -m specrl.cache verify|info run=DIR"),
        (["verfy", "run=x"], 2, "Did you mean 'verify'?"),
        (["verify"], 2, "run is missing."),
        (["verify", "path=x"], 2, "Unknown option 'path'. Did you mean 'run'?"),
        (["verify", "rnu=x"], 2, "Did you mean 'run'?"),
        (["info", "run=no/such"], 2, "No run at no/such."),
    ],
)
def test_mistakes_are_explained(capsys, words, code, said):
    assert main(words) == code
    assert said in capsys.readouterr().err


def test_a_run_a_checkpoint_and_their_trajectories_name_one_cache(directory, tmp_path, capsys):
    run = tmp_path / "run"
    for place in (run / "trajectories", run / "checkpoints" / "checkpoint-3" / "trajectories"):
        place.mkdir(parents=True)
        (place / SNAPSHOT).write_bytes((directory / SNAPSHOT).read_bytes())
    for given in (run, run / "trajectories", run / "checkpoints" / "checkpoint-3"):
        assert main(["info", f"run={given}"]) == 0
        assert "8, 1 examples" in capsys.readouterr().out
    assert main(["verify", f"run={run / 'checkpoints'}"]) == 3
    assert f"There is no trajectory cache in '{run / 'checkpoints'}'." in capsys.readouterr().err


def test_runs_as_a_module(directory):
    command = [sys.executable, "-m", "specrl.cache", "verify", f"run={directory}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.startswith("8 entries: 8 good")
    assert main(["help=true"]) == 0
