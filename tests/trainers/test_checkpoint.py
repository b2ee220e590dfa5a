"""Incomplete checkpoints are never used, and a killed run ends like the uninterrupted one after a resume."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from hashlib import blake2b
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import specrl.train
from specrl.config import load as cli
from specrl.config.load import RUN_ERROR
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache, load
from specrl.rollout.config import RolloutConfig
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import Trajectory
from specrl.trainers import callbacks, checkpoint
from specrl.trainers.checkpoint import (
    MARKER,
    Checkpoint,
    CheckpointError,
    CompleteCheckpoint,
    completed,
    newest,
    prune,
    set_aside_damaged,
)
from tests.runs import ROOT, differences, policy, run, words


def make(folder, step, complete=True):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(bytes(range(100)))
    if complete:
        save(None, folder, step, keep=99)
    return path


def left(folder):
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


def test_newest_is_the_complete_one_of_the_highest_step(tmp_path):
    assert newest(tmp_path / "absent") is None
    for step in (9, 100, 20):
        make(tmp_path, step)
    make(tmp_path, 300, complete=False)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-400x").mkdir()
    assert newest(tmp_path) == Checkpoint(tmp_path / "checkpoint-100")
    assert newest(tmp_path).step == 100
    (tmp_path / "checkpoint-100" / MARKER).unlink()
    assert newest(tmp_path) == Checkpoint(tmp_path / "checkpoint-20")


def test_prune_keeps_the_newest_complete_ones(tmp_path):
    for step in (1, 2, 3, 10):
        make(tmp_path, step)
    make(tmp_path, 5, complete=False)
    make(tmp_path, 11, complete=False)
    prune(Checkpoint(tmp_path / "checkpoint-10"), keep=2)
    assert left(tmp_path) == [3, 10, 11], "an interrupted save after the newest may still be going on"
    prune(Checkpoint(tmp_path / "checkpoint-10"), keep=1)
    assert left(tmp_path) == [10, 11]


def test_an_interrupted_removal_leaves_no_checkpoint_that_looks_complete(tmp_path, monkeypatch):
    make(tmp_path, 1)
    make(tmp_path, 2)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *args, **kwargs: None)  # killed before the first file
    prune(Checkpoint(tmp_path / "checkpoint-2"), keep=1)
    assert left(tmp_path) == [1, 2]
    (tmp_path / "checkpoint-2" / MARKER).unlink()
    assert newest(tmp_path) is None


def save(cache, folder, step, keep=2, main=True):
    """A save as TRL does it: writes the directory with the weights, calls the callback, and returns it."""
    (folder / f"checkpoint-{step}").mkdir(exist_ok=True)
    args = SimpleNamespace(output_dir=str(folder))
    state = SimpleNamespace(global_step=step, is_world_process_zero=main)
    config = RolloutConfig()
    source = SpeculativeRollout(None, cache, config, seed=0)
    rollouts = SimpleNamespace(source=source, state=lambda: {"rollouts": step}, drafter_trainer=None)
    callback = CompleteCheckpoint(rollouts, keep, {"train": "9f"})
    callback.on_save(args, state, None)
    return callback


def small_cache():
    cache = TrajectoryCache(Fingerprint())
    cache.put("a", 0, Trajectory((1, 2), 5, "length", 3, 3))
    return cache


def test_all_of_a_checkpoint_is_on_the_disk_before_its_marker(tmp_path, monkeypatch):
    """Files, directories and then the marker's name are synced: power loss leaves a complete or unmarked checkpoint."""
    folder, order, fsync, replace = tmp_path / "checkpoint-4", [], os.fsync, os.replace
    (folder / "shards").mkdir(parents=True)
    for name in ("model.safetensors", "shards/0.bin"):
        (folder / name).write_bytes(b"weights")

    def recorded_fsync(descriptor):
        order.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{folder}/"))
        fsync(descriptor)

    def recorded_replace(source, target):
        order.append(f"rename {os.path.basename(target)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    save(small_cache(), tmp_path, 4)
    cut, marked = order.index(f"{MARKER}.tmp"), order.index(f"rename {MARKER}")
    names = ("model.safetensors", "shards/0.bin", "trajectories/trajectories.parquet", "shards", "trajectories")
    before = order[order.index("rename trajectories.parquet") : cut]
    assert {*names, str(folder), str(tmp_path), str(tmp_path.parent)} <= set(before)
    assert all(before.index(file) < before.index(str(folder)) for file in names), "a directory after what it holds"
    assert order[cut:] == [f"{MARKER}.tmp", f"rename {MARKER}", str(folder)]
    assert marked == len(order) - 2


def test_the_marker_lists_every_file_and_the_cache_is_in_the_cut(tmp_path):
    make(tmp_path, 4, complete=False)
    save(small_cache(), tmp_path, 4)
    mark = json.loads((tmp_path / "checkpoint-4" / MARKER).read_text())
    assert mark["step"] == 4
    assert mark["files"].keys() == {"model.safetensors", "trajectories/trajectories.parquet"}
    digest = blake2b(bytes(range(100)), digest_size=16).hexdigest()
    assert mark["files"]["model.safetensors"] == [100, digest]
    restored = []
    rollouts = SimpleNamespace(restore=restored.append, drafter_trainer=None)
    Checkpoint(tmp_path / "checkpoint-4").restore(rollouts)
    assert restored == [{"rollouts": 4}]
    assert Checkpoint(tmp_path / "checkpoint-4").marker()["data"] == {"train": "9f"}
    loaded = load(Checkpoint(tmp_path / "checkpoint-4").trajectories, Fingerprint(), 10)
    assert loaded.get("a", 0).tokens == (1, 2)


def test_old_checkpoints_go_only_after_the_new_one_is_complete(tmp_path, monkeypatch):
    save(None, tmp_path, 1, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_durably", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save(None, tmp_path, 2, keep=1)
    assert newest(tmp_path) == Checkpoint(tmp_path / "checkpoint-1")
    save(None, tmp_path, 3, keep=1)
    assert left(tmp_path) == [3]


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trajectories").write_text("a file in the way")
    save(small_cache(), tmp_path, 1)
    assert newest(tmp_path) == Checkpoint(tmp_path / "checkpoint-1"), "complete without it"


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_space(tmp_path, capsys):
    options = {"trainer__max_steps": 4, "trainer__save_every": 1}
    uninterrupted = run(tmp_path, name="whole", **options)
    first = run(tmp_path, **(options | {"trainer__max_steps": 2}))
    weights = min(path.stat().st_size for path in tmp_path.rglob("model.safetensors"))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (weights // 2, unlimited[1]))
    try:
        code = cli.run(specrl.train.main, words(tmp_path, **options, resume="auto"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert (code, len(errors)) == (RUN_ERROR, 1)
    assert "checkpoint-3 cannot be written: " in errors[0]
    assert "File too large" in errors[0]
    assert newest(tmp_path / "run" / "checkpoints").path.name == "checkpoint-2"
    assert differences(first + run(tmp_path, **options, resume="auto"), uninterrupted) == []


def test_what_a_checkpoint_carries_does_not_grow_with_the_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(callbacks, "HISTORY", 2)
    record = run(tmp_path, trainer__max_steps=4)
    assert [log["step"] for log in record.trainer.state.log_history][-1] == 4
    assert len(record.trainer.state.log_history) == 2


# Damaged -------------------------------------------------------------------------------------------------------------

RECORDED = {"config": "ppo_math", "trainer__max_steps": 4, "trainer__save_every": 2}
"""With all the files that any run has."""
SPOILS = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "nested too deep": lambda path: path.write_bytes(b"[" * 100_000),
    "one bit": lambda path: path.write_bytes(flipped(path.read_bytes())),
}


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


class Canary:
    """Unpickling it creates a file."""

    def __reduce__(self):
        return os.system, ('touch "$SPECRL_CANARY"',)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The directory of a run with checkpoints of steps 2 and 4."""
    return run(tmp_path_factory.mktemp("recorded"), **RECORDED).folder


@pytest.fixture
def copied(recorded, tmp_path):
    """The checkpoints of a copy of the recorded run."""
    shutil.copytree(recorded, tmp_path / "run")
    return tmp_path / "run" / "checkpoints"


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_damage_of_any_file_is_named_and_the_older_checkpoint_is_used(copied, caplog, spoil):
    latest = copied / "checkpoint-4"
    files = sorted(path for path in latest.rglob("*") if path.is_file() and path.suffix != ".lock")
    assert {MARKER, "trajectories.parquet"} < {path.name for path in files}
    assert len(files) >= 5
    for path in files:
        data, name = path.read_bytes(), path.relative_to(latest).as_posix()
        caplog.clear()
        spoil(path)
        if name.startswith("evaluations/"):
            assert newest(copied).path == latest, "it costs drafts only"
        elif name.startswith("trajectories/"):
            assert newest(copied).path == latest, "it costs drafts only"
            assert f"checkpoint-4: {name} " in caplog.text
            assert newest(copied, text_decides=True) == Checkpoint(copied / "checkpoint-2")
        else:
            assert newest(copied) == Checkpoint(copied / "checkpoint-2"), name
        if path.exists() or name != MARKER:  # without its marker it counts as an interrupted save
            assert sum(name in record.getMessage() for record in caplog.records) >= 1
            assert all("\n" not in record.getMessage() for record in caplog.records)
        path.write_bytes(data)
    assert newest(copied).path == latest, "all is as it was"


@pytest.mark.parametrize("text", ["null", '{"step": 4, "files": 3, "digest": "00"}', "\xff\xfe", "PAR1"])
def test_a_foreign_marker_is_refused_in_one_line(tmp_path, text):
    (make(tmp_path, 4) / MARKER).write_text(text)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* resumed from: checkpoint-4 .*start anew$"):
        newest(tmp_path)
    make(tmp_path, 2)
    assert newest(tmp_path) == Checkpoint(tmp_path / "checkpoint-2")


def test_a_marker_of_another_step_or_with_another_number_is_refused(tmp_path):
    make(tmp_path, 4).rename(tmp_path / "checkpoint-5")
    with pytest.raises(CheckpointError, match="not what was written there"):
        newest(tmp_path)
    path = make(tmp_path, 6) / MARKER
    path.write_text(path.read_text().replace('"rollouts": 6', '"rollouts": 7'))
    with pytest.raises(CheckpointError, match="not what was written there"):
        Checkpoint(path.parent).marker()


def test_damaged_checkpoints_are_left_aside_each_under_a_name_of_its_own(tmp_path):
    for _ in range(2):
        for step in (1, 2, 3):
            shutil.rmtree(tmp_path / f"checkpoint-{step}", ignore_errors=True)
            make(tmp_path, step)
        set_aside_damaged(tmp_path, Checkpoint(tmp_path / "checkpoint-1"))
    names = ["checkpoint-1", *(f"damaged-checkpoint-{n}{twin}" for n in (2, 3) for twin in ("", "-2"))]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert newest(tmp_path) == Checkpoint(tmp_path / "checkpoint-1")


@pytest.mark.slow
def test_a_run_goes_on_from_the_older_checkpoint_and_ends_as_the_uninterrupted_one(
    copied, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("SPECRL_CANARY", str(tmp_path / "ran"))
    options = RECORDED | {"trainer__max_steps": 5}
    uninterrupted = run(tmp_path, name="whole", **options)
    target = next((copied / "checkpoint-4").glob("optimizer.*"))
    torch.save({"state": Canary()}, target)
    rest = run(tmp_path, resume="auto", **options)
    assert f"{target.name} has " in caplog.text
    assert "resuming from checkpoint-2" in caplog.text
    assert not (tmp_path / "ran").exists(), "foreign code never runs"
    assert [step.tokens for step in rest.steps] == [step.tokens for step in uninterrupted.steps[2:]]
    assert rest.losses == uninterrupted.losses[-len(rest.losses) :]
    assert all(torch.equal(tensor, uninterrupted.weights[name]) for name, tensor in rest.weights.items())
    assert left(copied) == [4, 5]
    assert (copied / "damaged-checkpoint-4" / target.name).is_file()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_a_finished_run_that_is_resumed_takes_no_step(tmp_path):
    """transformers takes one where max_steps ends a run within an epoch."""
    options = {"trainer__max_steps": 2, "trainer__save_every": 1}
    whole = run(tmp_path, **options)
    again = run(tmp_path, resume="auto", **options)
    assert (len(whole.steps), len(again.steps)) == (2, 0)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in lines) == 2


def test_when_all_are_damaged_the_run_stops_in_one_line_and_touches_nothing(copied, tmp_path, capsys):
    for path in copied.glob("checkpoint-*"):
        next(path.glob("*.safetensors")).write_bytes(b"")
    assert cli.run(specrl.train.main, words(tmp_path, **RECORDED, resume="auto")) == RUN_ERROR
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "has 0 bytes instead of" in errors[0]
    assert f"start another name, or remove {tmp_path / 'run'} to start anew" in errors[0]
    assert left(copied) == [2, 4]


# Killed --------------------------------------------------------------------------------------------------------------

OPTIONS = {
    "rollout__replay": 0.5,
    "trainer__epochs": 8,
    "trainer__save_every": 1,
    "trainer__keep_checkpoints": 1,
    "resume": "auto",
}


@pytest.mark.long
def test_killed_at_random_moments_it_ends_as_the_uninterrupted_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.runs"])  # training is killed, not the imports
    options = {**OPTIONS, "model": str(policy())}
    uninterrupted = run(tmp_path, name="whole", **options)
    assert len(uninterrupted.steps) == 24
    rng, folder, reached = random.Random(0), tmp_path / "killed" / "checkpoints", [0]
    for _ in range(4):
        process = context.Process(target=run, args=(tmp_path,), kwargs={"name": "killed", **options})
        process.start()
        deadline, target = time.monotonic() + 60, reached[-1] + rng.randint(1, 2)
        while process.is_alive() and time.monotonic() < deadline:
            if (saved := completed(folder)) and saved[-1].step >= target:
                break
            time.sleep(0.005)
        time.sleep(rng.random() * 0.2)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it was killed while it trained"
        reached.append(newest(folder).step)
    assert 0 < reached[1] < reached[-1] < 24
    rest = run(tmp_path, name="killed", **options)
    assert [step.step for step in rest.steps] == list(range(reached[-1], 24))
    assert [step.tokens for step in rest.steps] == [step.tokens for step in uninterrupted.steps[reached[-1] :]]
    ended, expected = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("killed", "whole"))
    assert ended.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ended.items())
    lines = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 25)), "every step is recorded once"
