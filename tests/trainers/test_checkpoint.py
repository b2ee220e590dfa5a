"""Checkpoints are whole or they are not used; a killed run ends as the uninterrupted one."""

import json
import multiprocessing
import os
import random
import resource
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import specrl.train
from rollout.cache import Fingerprint, TrajectoryCache
from rollout.config import CacheConfig
from rollout.types import CacheError, Trajectory
from specrl import config as cli
from specrl.config import RUN_ERROR
from tests.runs import ROOT, differences, policy, run, words
from trainers import callbacks, checkpoint
from trainers.checkpoint import MARKER, SaveCache, newest, prune, stage_state, step_of, trajectories


def make(folder, step, complete=True):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").touch()
    if complete:
        (path / MARKER).write_text("{}")
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
    assert newest(tmp_path) == tmp_path / "checkpoint-100"
    assert step_of(newest(tmp_path)) == 100
    (tmp_path / "checkpoint-100" / MARKER).unlink()
    assert newest(tmp_path) == tmp_path / "checkpoint-20"


def test_prune_keeps_the_newest_complete_ones(tmp_path):
    for step in (1, 2, 3, 10):
        make(tmp_path, step)
    make(tmp_path, 5, complete=False)
    make(tmp_path, 11, complete=False)
    prune(tmp_path, keep=2)
    assert left(tmp_path) == [3, 10, 11], "an interrupted save after the newest may still be going on"
    prune(tmp_path, keep=1)
    assert left(tmp_path) == [10, 11]


def test_prune_removes_nothing_before_something_is_complete(tmp_path):
    make(tmp_path, 1, complete=False)
    make(tmp_path, 2, complete=False)
    prune(tmp_path, keep=1)
    assert left(tmp_path) == [1, 2]


def test_an_interrupted_removal_leaves_no_checkpoint_that_looks_complete(tmp_path, monkeypatch):
    make(tmp_path, 1)
    make(tmp_path, 2)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *args, **kwargs: None)  # killed before the first file
    prune(tmp_path, keep=1)
    assert left(tmp_path) == [1, 2]
    (tmp_path / "checkpoint-2" / MARKER).unlink()
    assert newest(tmp_path) is None


def save(cache, folder, step, keep=2, on_write_error="warn", main=True):
    """What TRL does at a save: the directory with the weights, then the callback."""
    (folder / f"checkpoint-{step}").mkdir(exist_ok=True)
    args = SimpleNamespace(output_dir=str(folder))
    state = SimpleNamespace(global_step=step, is_world_process_zero=main)
    callback = SaveCache(cache, CacheConfig(on_write_error=on_write_error), keep, lambda: {"rollouts": step})
    callback.on_save(args, state, None)


def small_cache():
    cache = TrajectoryCache(Fingerprint(), vocab_size=10)
    cache.put("a", 0, Trajectory((1, 2), 5, "length", 3, 3))
    return cache


def test_the_marker_comes_last_and_the_cache_is_in_the_cut(tmp_path, monkeypatch):
    order, replace, try_save = [], os.replace, TrajectoryCache.try_save
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(os.path.basename(b)), replace(a, b)))
    monkeypatch.setattr(TrajectoryCache, "try_save", lambda *a: (order.append("cache"), try_save(*a))[1])
    save(small_cache(), tmp_path, 4)
    assert order == ["cache", "trajectories.parquet", MARKER]
    assert json.loads((tmp_path / "checkpoint-4" / MARKER).read_text()) == {
        "step": 4,
        "cache": True,
        "stage": {"rollouts": 4},
    }
    assert stage_state(tmp_path / "checkpoint-4") == {"rollouts": 4}
    loaded = TrajectoryCache.load(trajectories(tmp_path / "checkpoint-4"), Fingerprint(), 10)
    assert loaded.get("a", 0).tokens == (1, 2)


def test_old_checkpoints_go_only_after_the_new_one_is_complete(tmp_path, monkeypatch):
    save(None, tmp_path, 1, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_durably", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save(None, tmp_path, 2, keep=1)
    assert newest(tmp_path) == tmp_path / "checkpoint-1"
    save(None, tmp_path, 3, keep=1)
    assert left(tmp_path) == [3]


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trajectories").write_text("a file in the way")
    with pytest.raises(CacheError, match="cannot be written"):
        save(small_cache(), tmp_path, 1, on_write_error="stop")
    assert newest(tmp_path) is None
    save(small_cache(), tmp_path, 1)
    assert json.loads((tmp_path / "checkpoint-1" / MARKER).read_text())["cache"] is False


def test_only_the_first_process_writes(tmp_path):
    save(small_cache(), tmp_path, 1, main=False)
    assert list((tmp_path / "checkpoint-1").iterdir()) == []


def test_a_run_keeps_the_newest_checkpoints_and_one_at_the_end(tmp_path):
    run(tmp_path, trainer__max_steps=5, trainer__save_every=1, trainer__keep_checkpoints=2)
    folder = tmp_path / "run" / "checkpoints"
    assert left(folder) == [4, 5]
    assert newest(folder).name == "checkpoint-5"
    assert (trajectories(newest(folder)) / "trajectories.parquet").is_file()


def test_without_save_every_the_end_is_saved(tmp_path):
    run(tmp_path, trainer__max_steps=2)
    assert left(tmp_path / "run" / "checkpoints") == [2]
    more = run(tmp_path, trainer__max_steps=3, resume="auto")
    assert [step.step for step in more.steps] == [2], "and can be gone on from"


ALGORITHMS = pytest.mark.parametrize("algorithm", [{}, {"config": "ppo_math"}], ids=["grpo", "ppo"])


@ALGORITHMS
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_space(tmp_path, capsys, algorithm):
    options = {"trainer__max_steps": 4, "trainer__save_every": 1, **algorithm}
    whole = run(tmp_path, name="whole", **options)
    first = run(tmp_path, **(options | {"trainer__max_steps": 2}))
    weights = min(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
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
    assert newest(tmp_path / "run" / "checkpoints").name == "checkpoint-2"
    assert differences(first + run(tmp_path, **options, resume="auto"), whole) == []


@ALGORITHMS
def test_what_a_checkpoint_carries_does_not_grow_with_the_steps(tmp_path, monkeypatch, algorithm):
    monkeypatch.setattr(callbacks, "HISTORY", 2)
    record = run(tmp_path, trainer__max_steps=4, **algorithm)
    assert [log["step"] for log in record.trainer.state.log_history][-1] == 4
    assert len(record.trainer.state.log_history) == 2


# Killed --------------------------------------------------------------------------------------------------------------

OPTIONS = {
    "rollout__replay": 0.5,
    "trainer__epochs": 8,
    "trainer__save_every": 1,
    "trainer__keep_checkpoints": 1,
    "resume": "auto",
}


@pytest.mark.slow
@ALGORITHMS
def test_killed_at_random_moments_it_ends_as_the_uninterrupted_run(tmp_path, monkeypatch, algorithm):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.runs"])  # what is killed is training, not the imports
    options = {**OPTIONS, **algorithm, "model": str(policy())}
    whole = run(tmp_path, name="whole", **options)
    assert len(whole.steps) == 24
    rng, folder, reached = random.Random(0), tmp_path / "killed" / "checkpoints", [0]
    for _ in range(8):
        process = context.Process(target=run, args=(tmp_path,), kwargs={"name": "killed", **options})
        process.start()
        deadline, target = time.monotonic() + 60, reached[-1] + rng.randint(1, 2)
        while process.is_alive() and time.monotonic() < deadline:
            if (at := newest(folder)) and step_of(at) >= target:
                break
            time.sleep(0.005)
        time.sleep(rng.random() * 0.2)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it was killed while it trained"
        reached.append(step_of(newest(folder)))
    assert 0 < reached[1] < reached[-1] < 24
    rest = run(tmp_path, name="killed", **options)
    assert [step.step for step in rest.steps] == list(range(reached[-1], 24))
    assert [step.tokens for step in rest.steps] == [step.tokens for step in whole.steps[reached[-1] :]]
    ended, expected = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("killed", "whole"))
    assert ended.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ended.items())
    lines = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 25)), "every step is recorded once"
