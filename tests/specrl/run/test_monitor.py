import io
import json
import math
import os
import sys

import pytest
import torch
from rich.console import Console

from specrl.results.records import load_run, read_records
from specrl.run.monitor import Monitor, duration, eval_line, step_line
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


def test_step_line_in_full():
    shown = "18.2 s | reward 0.61 | gen 7.9 s (2.9x) | reused 71% | accept 0.83 | kl 0.004 | 5.1k tok/s | ETA 1h18"
    assert step_line(FULL, 300, 4680) == f"Step 42/300 | {shown}"
    assert "| ahead 92% | reused 71%" in step_line(FULL | {"spec/ahead_ratio": 0.92}, 300, 4680)


@pytest.mark.parametrize(("step", "speedup"), [(1, None), (9999, 2.9)])
def test_a_step_fits_eighty_columns(step, speedup, tmp_path):
    console = Console(record=True, width=80, file=io.StringIO())
    record = FULL | {"step": step, "timing_s/step": 118.2, "spec/speedup": speedup}
    with Monitor(tmp_path, 10_000, console) as monitor:
        monitor.log(record)
    (line,) = console.export_text().splitlines()
    assert len(line) <= 80
    assert line.startswith(f"Step {step}/10000 | 118.2 s | reward 0.61 | gen 7.9 s")
    assert "ETA " in line


def test_what_goes_first_on_a_narrow_console():
    line = step_line(FULL, 300, 4680)
    for word in (" | 5.1k tok/s", " | kl 0.004", " | accept 0.83", " | reused 71%", " | 18.2 s"):
        assert step_line(FULL, 300, 4680, len(line)) == line
        narrower = step_line(FULL, 300, 4680, len(line) - 1)
        assert narrower == line.replace(word, "") != line
        line = narrower
    assert step_line(FULL, 300, 4680, 10) == line


def test_an_evaluation_fits_eighty_columns():
    metrics = {"eval/reward": 0.7578125, "eval/mean_length": 105.4, "eval/failed": 0}
    metrics |= {"eval/pass@1": 0.7578125, "eval/pass@2": 0.828, "eval/pass@4": 0.875}
    none = eval_line(3, {"eval/failed": 8})
    assert none == "Eval at step 3 | no response could be scored | failed 8"
    assert eval_line(10_000, metrics) == "Eval at step 10000 | reward 0.758 | length 105 | pass@1/2/4 0.758 0.828 0.875"
    assert "| failed 3 |" in eval_line(0, metrics | {"eval/failed": 3})


def test_a_terminal_wraps_between_words_and_a_log_file_does_not(tmp_path):
    sentence = "Speculation pauses because drafts would have lost time; outputs are the same."
    for terminal, lines in ((True, 3), (False, 1)):
        console = Console(record=True, width=30, file=io.StringIO(), force_terminal=terminal, color_system="truecolor")
        Monitor(tmp_path, 9, console).note(sentence)
        shown = console.export_text(styles=True).splitlines()
        assert len(shown) == lines
        assert " ".join(line.strip() for line in shown) == sentence, "no word is cut, no number coloured"


def test_step_line_leaves_out_what_is_missing_or_nan():
    record = {"step": 1, "reward": math.nan, "timing_s/gen": 2.0, "kl": None, "perf/throughput": 640.0}
    assert step_line(record, 9) == "Step 1/9 | gen 2.0 s | 640 tok/s"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0s"), (59.6, "1m00"), (750, "12m30"), (4680, "1h18"), (3599.7, "1h00")]
)
def test_duration(seconds, shown):
    assert duration(seconds) == shown


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
    monitor.close()
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
def test_rewards_without_any_spread_are_noted_once_after_some_rollouts(tmp_path, shares, expected):
    assert warned(tmp_path, shares) == expected


def test_a_critic_learns_from_equal_rewards(tmp_path):
    assert warned(tmp_path, [1.0] * 9, compares_groups=False) == []
    for options, compares in (
        ({}, True),
        ({"algorithm": "dapo"}, True),
        ({"algorithm": "ppo", "advantage": "rloo"}, True),
        ({"algorithm": "ppo"}, False),
        ({"algorithm": "ppo", "advantage": "reinforce_plus_plus"}, False),
    ):
        assert TrainerConfig(**options).compares_groups == compares


def test_the_warning_names_the_mean_the_responses_and_what_to_set(tmp_path):
    console = text_console()
    with Monitor(tmp_path, 9, console, compares_groups=True) as monitor:
        for step in range(1, 6):
            monitor.log({"step": step, "reward": 0.0, "frac_reward_zero_std": 1.0})
    text = " ".join(console.export_text().split())
    named = ("mean 0)", str(tmp_path / "completions"), "rollout.max_new_tokens", "rollout.temperature", "group_size")
    assert all(word in text for word in named)


def test_records_are_flushed_strict_json_with_null_for_nan(tmp_path):
    monitor = Monitor(tmp_path / "run", 2, text_console())
    monitor.log({"step": 1, "reward": math.nan, "kl": torch.tensor(0.5), "loss": float("-inf"), "grad_norm": torch.inf})
    line = (tmp_path / "run" / "metrics.jsonl").read_text()
    strict = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert strict == {"step": 1, "reward": None, "kl": 0.5, "loss": None, "grad_norm": None}
    assert line.endswith("\n")


def test_eta_comes_from_the_mean_step_time(tmp_path):
    console = text_console()
    with Monitor(tmp_path, 10, console) as monitor:
        monitor.log({"step": 1, "timing_s/step": 10.0})
        monitor.log({"step": 2, "timing_s/step": 20.0})
    assert "ETA 1m30" in console.export_text(clear=False).splitlines()[0]
    assert "ETA 2m00" in console.export_text().splitlines()[1]


def test_plain_console_has_no_escape_codes_and_one_line_per_record(tmp_path, capsys):
    with Monitor(tmp_path, 300, Console(file=sys.stdout, width=40)) as monitor:
        monitor.log(FULL)
        monitor.log_eval(42, {"eval/reward": 0.5, "eval/pass@1": 0.25})
    out = capsys.readouterr().out
    assert "\x1b" not in out
    kept = "Step 42/300 | reward 0.61 | gen 7.9 s (2.9x) | ETA 1h18"
    assert out.splitlines() == [kept, "Eval at step 42 | reward 0.5 | pass@1 0.25"]


def test_terminal_shows_a_progress_bar_and_the_lines(tmp_path):
    console = text_console(force_terminal=True)
    with Monitor(tmp_path, 300, console) as monitor:
        monitor.log(FULL)
        assert console._live_stack
    assert not console._live_stack
    assert "Step 42/300" in console.export_text()


@pytest.mark.parametrize(
    ("lines", "resumed_step", "kept"),
    [
        (b'{"step": 0, "eval/reward": 1}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "rew', 2, [0, 1, 2]),
        (b'{"step": 1}\n{"step": 7}\n{"step": 8, "note": "\xc3', None, [1, 7]),
        (b'{"step": 1}\n{"step": 2}', None, [1, 2]),
        (b'{"step": 0, "eval/reward": 1}\n{"step": 1}\n', -1, []),
    ],
    ids=["later steps", "a torn line", "no last newline", "no checkpoint"],
)
def test_the_records_that_a_resumed_run_keeps(tmp_path, lines, resumed_step, kept):
    (tmp_path / "metrics.jsonl").write_bytes(lines)
    monitor = Monitor(tmp_path, 9, text_console(), resumed_step)
    assert steps_of(monitor.path) == kept
    before = monitor.path.stat().st_mtime_ns
    Monitor(tmp_path, 9, text_console(), resumed_step)
    assert monitor.path.stat().st_mtime_ns == before, "an intact file is not written again"
    monitor.log({"step": 9})
    assert steps_of(monitor.path) == [*kept, 9]


def test_a_record_is_on_the_disk_when_it_is_written(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (flushed.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    Monitor(tmp_path, 9, text_console()).log({"step": 1})
    assert flushed == [str(tmp_path / "metrics.jsonl")]


def test_a_full_disk_is_noted_once_and_never_stops_the_run(tmp_path):
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


def test_load_run_keeps_the_last_record_of_a_step(tmp_path):
    path = tmp_path / "a" / "metrics.jsonl"
    path.parent.mkdir()
    steps = ['{"step": 2, "reward": 1}', '{"step": 1, "reward": 0}', '{"step": 2, "reward": 3}']
    path.write_text("\n".join([*steps, '{"step": 2, "eval/reward": 5}', "torn"]))
    run = load_run(tmp_path / "a")
    assert [record["reward"] for record in run.steps] == [0, 3]
    assert run.evals == [{"step": 2, "eval/reward": 5}]
    assert run.unreadable == 1


def test_a_pause_is_noted_once_with_its_figures_and_so_is_its_end(tmp_path):
    console = text_console()
    paused = {"spec/paused_ratio": 0.8, "spec/paused_acceptance": 0.12, "spec/paused_needed": 0.55}
    with Monitor(tmp_path, 9, console) as monitor:
        for step, record in enumerate(({"spec/paused_ratio": 0.2}, paused, paused, {}, paused), 1):
            monitor.log({"step": step, **record})
        assert console.file.getvalue().count("pauses") == 1
        assert "resumed" not in console.file.getvalue()
        monitor.log({"step": 6, "spec/paused_ratio": 0.5})
        monitor.log({"step": 7, "spec/paused_ratio": 0.1})
    printed = console.file.getvalue()
    assert "80% of the rows' passes" in printed
    assert printed.count("0.12") == printed.count("0.55") == 1
    assert printed.count("resumed") == printed.count("pauses") == 1


def test_flips_are_noted_once(tmp_path):
    console = text_console()
    none = {"spec/control_mismatches": 0, "spec/compared_tokens": 500}
    some = {"spec/control_mismatches": 2, "spec/compared_tokens": 500, "spec/flip_position": 120.0}
    with Monitor(tmp_path, 9, console) as monitor:
        monitor.log({"step": 1, **none})
        assert "plain decoding" not in console.file.getvalue()
        for step in (2, 3):
            monitor.log({"step": step, **some})
    assert " ".join(console.file.getvalue().split()).count("4 of 1,000 tokens differ") == 1
