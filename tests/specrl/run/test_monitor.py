import io
import json
import math
import os

import pytest
import torch
from rich.console import Console

from specrl.results.records import read_records
from specrl.run.monitor import Monitor
from specrl.trainers.config import TrainerConfig


def text_console(**options) -> Console:
    return Console(record=True, width=200, file=io.StringIO(), **options)


def steps_of(path) -> list[int]:
    return [record["step"] for record in read_records(path)[0]]


def warned(tmp_path, shares, compares_groups=True, **more) -> list[int]:
    """The steps that are followed by the warning, given each step's share of groups whose rewards are equal."""
    steps = []
    for step, share in enumerate(shares, 1):
        console = text_console()
        if step == 1:
            monitor = Monitor(tmp_path, 99, console, compares_groups=compares_groups)
        monitor.console = console
        known = {} if share is None else {"frac_reward_zero_std": share}
        monitor.log({"step": step, "reward": 0.25, **known, **more})
        if "Nothing is learned" in console.export_text():
            steps.append(step)
    return steps


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([1.0] * 30, [5]),
        ([1.0, 1.0, 1.0, 1.0, 0.875] * 6, []),
        ([1.0, 1.0, 0.5, *[1.0] * 9], [8]),
        ([1.0, None] * 9, [9]),  # the later updates of a rollout
        ([math.nan] * 9, []),
    ],
)
def test_rewards_without_any_spread_are_said_once_after_some_rollouts(tmp_path, shares, expected):
    assert warned(tmp_path, shares) == expected


def test_a_critic_learns_from_equal_rewards(tmp_path):
    assert warned(tmp_path, [1.0] * 9, compares_groups=False) == []
    for settings, compares in (
        ({}, True),
        ({"algorithm": "dapo"}, True),
        ({"algorithm": "ppo", "advantage": "rloo"}, True),
        ({"algorithm": "ppo"}, False),
        ({"algorithm": "ppo", "advantage": "reinforce_plus_plus"}, False),
    ):
        assert TrainerConfig(**settings).compares_groups == compares


def test_records_are_flushed_strict_json_with_null_for_nan(tmp_path):
    monitor = Monitor(tmp_path / "run", 2, text_console())
    monitor.log({"step": 1, "reward": math.nan, "kl": torch.tensor(0.5), "loss": float("-inf"), "grad_norm": torch.inf})
    line = (tmp_path / "run" / "metrics.jsonl").read_text()
    strict = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert strict == {"step": 1, "reward": None, "kl": 0.5, "loss": None, "grad_norm": None}
    assert line.endswith("\n")


def test_resume_drops_later_steps_and_a_torn_last_line(tmp_path):
    console = text_console()
    monitor = Monitor(tmp_path, 9, console)
    monitor.log_eval(0, {"eval/reward": 0.1})
    for step in (1, 2, 3, 4):
        monitor.log({"step": step, "reward": step / 10})
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 5, "rew')
    resumed = Monitor(tmp_path, 9, console, resumed_step=2)
    assert steps_of(path) == [0, 1, 2]
    resumed.log({"step": 3, "reward": 0.9})
    assert [record.get("reward") for record in read_records(path)[0]] == [None, 0.1, 0.2, 0.9]
    assert "dropped 1 unreadable line." in console.export_text()


def test_a_record_is_on_the_disk_when_it_is_written(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (flushed.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    Monitor(tmp_path, 9, text_console()).log({"step": 1})
    assert flushed == [str(tmp_path / "metrics.jsonl")]


def test_a_full_disk_is_said_once_and_never_stops_the_run(tmp_path):
    console = text_console()
    monitor = Monitor(tmp_path, 9, console)
    monitor.path.mkdir()
    monitor.log({"step": 1})
    monitor.log({"step": 2})
    monitor.path.rmdir()
    monitor.path.write_text('{"step": 2, "rew')
    monitor.log({"step": 3})
    assert console.export_text().count("cannot be written") == 1
    assert steps_of(monitor.path) == [3]
