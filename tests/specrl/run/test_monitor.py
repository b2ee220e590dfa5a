import io
import json
import math
import os

import pytest
import torch
from rich.console import Console

from specrl.results.records import read_records
from specrl.run.monitor import Monitor, step_line
from specrl.trainers.config import TrainerConfig

FULL = {
    "step": 42,
    "timing_s/step": 18.2,
    "reward": 0.61,
    "timing_s/gen": 7.9,
    "spec/speedup": 2.9,
    "spec/reused_ratio": 0.71,
    "spec/draft_acceptance_rate": 0.83,
    "kl": 0.004,
    "perf/throughput": 5100,
}


def text_console(**options) -> Console:
    return Console(record=True, width=200, file=io.StringIO(), **options)


def steps_of(path) -> list[int]:
    return [record["step"] for record in read_records(path)[0]]


def test_the_line_of_a_step_fits_eighty_columns_and_leaves_out_what_is_unknown():
    line = step_line(FULL, 300, 4680)
    assert line == "Step 42/300 | 18.2 s | reward 0.61 | gen 7.9 s (2.9x) | reused 71% | ETA 1h18"
    assert len(step_line(FULL | {"step": 999, "timing_s/step": 118.2}, 1000, 4680)) <= 80
    assert "| ahead 92% | reused 71%" in step_line(FULL | {"spec/ahead_ratio": 0.92}, 300)
    assert step_line({"step": 1, "reward": math.nan, "timing_s/gen": 2.0, "kl": None}, 9) == "Step 1/9 | gen 2.0 s"


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


def test_a_pause_is_said_once_with_its_reason_and_so_is_its_end(tmp_path):
    console = text_console()
    paused = {"spec/paused_ratio": 0.8, "spec/paused_acceptance": 0.12, "spec/paused_needed": 0.55}
    monitor = Monitor(tmp_path, 9, console)
    for step, record in enumerate(({"spec/paused_ratio": 0.2}, paused, paused, {}, paused), 1):
        monitor.log({"step": step, **record})
    assert console.file.getvalue().count("pauses") == 1
    assert "resumed" not in console.file.getvalue()
    monitor.log({"step": 6, "spec/paused_ratio": 0.5})
    monitor.log({"step": 7, "spec/paused_ratio": 0.1})
    said = console.file.getvalue()
    assert all(figure in said for figure in ("80%", "0.12", "0.55"))
    assert said.count("resumed") == said.count("pauses") == 1
