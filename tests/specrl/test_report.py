import json
import sys

import pytest

from specrl import report
from specrl.config.load import run as run_command
from specrl.config.load import save
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.report import ReportOptions
from specrl.results.evidence import ahead
from specrl.results.records import load_run, read_records
from specrl.results.report import NO_PLOT, write_report
from specrl.results.savings import Saving, breakdown, control_pairs, first_last, matched, rollouts, savings, step_s
from tests.runs import SHORT, recorded

# Two steps an epoch. Steps 1, 3 and 4 are control steps. What is charged adds up to gen:
# step 3: 2 + 0.5 + 0.25 + 0.25 and 2 of prefill and decode; step 4: 1 + 0.5 + 0 + 0 and 2.5 of prefill and decode.
STEPS = [
    {"step": 1, "epoch": 0.5, "timing_s/gen": 10.0, "spec/plain_s": 9.0, "reward": 0.2},
    {"step": 2, "epoch": 1.0, "timing_s/gen": 10.0, "reward": 0.4},
    {"step": 3, "epoch": 1.5, "timing_s/gen": 5.0, "spec/plain_s": 12.0, "reward": 0.5}
    | {"timing_s/verify": 2.0, "timing_s/draft": 0.5, "timing_s/lookup": 0.25, "timing_s/store": 0.25},
    {"step": 4, "epoch": 2.0, "timing_s/gen": 4.0, "spec/plain_s": 8.0, "reward": 0.7}
    | {"timing_s/verify": 1.0, "timing_s/draft": 0.5, "timing_s/prefill": 0.5, "timing_s/decode": 2.0},
]
BASELINE = [
    {"step": step, "epoch": step / 2, "timing_s/gen": gen, "timing_s/update": 3.0, "timing_s/step": gen + 5}
    for step, gen in ((1, 11.0), (2, 9.0), (3, 12.0), (4, 8.0), (5, 99.0))
]

MACHINE = {"cpu": "Abacus", "cores": 2, "usable_cores": 2, "threads": "1", "gpus": [], "versions": {"torch": "9"}}
# 16 steps of 5 s and two epochs, whose rollouts take 1 s, and plainly 2 s. Every step is a control step.
STEADY = [
    {"step": n, "epoch": n / 8, "timing_s/gen": 1.0, "spec/plain_s": 2.0, "timing_s/control": 2.0, "reward": 0.5}
    | {"timing_s/update": 2.0, "timing_s/step": 5.0}
    for n in range(1, 17)
]
PLAIN = [
    {"step": n, "epoch": n / 8, "timing_s/gen": 2.0, "timing_s/update": 2.0, "timing_s/step": 4.0, "reward": 0.5}
    for n in range(1, 17)
]


def rows(savings: list[Saving]) -> dict[str, tuple[float, float]]:
    return {saving.phase: (saving.plain_s, saving.specrl_s) for saving in savings}


def measured(steps) -> dict[str, Saving]:
    return {saving.phase: saving for saving in savings(control_pairs(steps))}


def step_ratio(steps) -> float:
    return measured(steps)["step, controls left out"].speedup.ratio


def paired(steps, baseline) -> list[Saving]:
    return savings(matched(steps, baseline))


def make_run(path, steps, acceptance="exact", epochs=2, **options) -> str:
    config = Config(name=path.name, output_dir=str(path.parent))
    config.rollout.acceptance, config.trainer.epochs = acceptance, epochs
    for key, value in options.items():
        setattr(config.rollout, key, value)
    save(config)
    (path / "environment.json").write_text(json.dumps(MACHINE))
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in steps))
    return str(path)


def test_measured_savings_by_hand():
    # The control steps save -1, 7 and 4 s; none may save more than the 4 s below the top one.
    assert rows(measured(STEPS).values()) == {
        "prefill and decode": (26.0, 14.5),
        "verify": (0.0, 3.0),
        "draft": (0.0, 1.0),
        "look-up": (0.0, 0.25),
        "store": (0.0, 0.25),
        "rollout, from epoch 2 on": (17.0, 9.0),
        "rollout, all these steps": (26.0, 19.0),
        **dict.fromkeys(("reward", "update", "step, controls left out"), (0.0, 0.0)),
    }


def test_phases_add_up_so_the_total_is_net():
    total = measured(STEPS)["rollout, all these steps"]
    parts = savings(control_pairs(STEPS))[:5]
    assert sum(part.saved_s for part in parts) == pytest.approx(total.saved_s) == 7.0
    assert total.speedup.ratio == pytest.approx(26 / 19), "a ratio of sums, not a mean of ratios"


def test_negative_control_gen_without_verification_gives_other_numbers():
    uncharged = [r | {"timing_s/gen": r["timing_s/gen"] - r.get("timing_s/verify", 0.0)} for r in STEPS]
    assert measured(uncharged)["rollout, all these steps"].saved_s == 9.0
    forgotten = [{key: value for key, value in r.items() if key != "timing_s/verify"} for r in STEPS]
    found = measured(forgotten)
    assert rows(found.values())["prefill and decode"] == (26.0, 17.5), "time of an unnamed phase is not lost"
    assert found["rollout, all these steps"].saved_s == 7.0


def test_paired_savings_by_hand_match_step_by_step():
    steps = [r | {"timing_s/update": 3.0, "timing_s/step": r["timing_s/gen"] + 5} for r in STEPS[::-1]]
    steps[0] |= {"timing_s/control": 8.0, "timing_s/step": 4.0 + 5 + 8}
    # Rollouts save 1, -1, 7 and 4 s, and so do complete steps: 7 counts as 4.
    assert rows(paired(steps, BASELINE)) == {
        "prefill and decode": (37.0, 24.5),
        "verify": (0.0, 3.0),
        "draft": (0.0, 1.0),
        "look-up": (0.0, 0.25),
        "store": (0.0, 0.25),
        "rollout, from epoch 2 on": (17.0, 9.0),
        "rollout, all these steps": (37.0, 29.0),
        "reward": (0.0, 0.0),
        "update": (12.0, 12.0),
        "step, controls left out": (57.0, 49.0),
    }
    assert paired(STEPS, BASELINE[4:]) == []


TIMED = [
    {"timing_s/step": 20.0, "timing_s/gen": 8.0, "timing_s/update": 9.0, "timing_s/reward": 2.0},
    {"timing_s/step": 30.0, "timing_s/gen": 6.0, "timing_s/update": 7.0, "timing_s/ref_log_prob": 3.0}
    | {"timing_s/control": 10.0, "timing_s/reuse_gap": 2.0, "spec/plain_s": 15.0},
]


def test_where_a_step_goes_by_hand():
    seconds = breakdown(TIMED)
    assert seconds == {"gen": 14.0, "reward": 2.0, "ref_log_prob": 3.0, "update": 16.0, "other": 3.0}
    assert sum(seconds.values()) == step_s(TIMED) == 38.0
    assert breakdown(STEPS) == {}


def test_negative_control_control_rows_charged_to_the_run_would_be_seen(tmp_path):
    charged = sum(record["timing_s/step"] for record in TIMED)
    assert step_s(TIMED) != charged == 50.0
    measurement = [record | {"timing_s/reuse_gap": 9.0, "timing_s/step": 14.0} for record in STEADY]
    found = rows(paired(measurement, PLAIN))
    assert found["rollout, all these steps"] == (32.0, 16.0)
    assert found["step, controls left out"] == (64.0, 48.0)


def test_complete_steps_against_plain_rollouts_by_hand():
    twice = [*TIMED, TIMED[1]]
    assert step_ratio(twice) == pytest.approx((18 - 6 + 15) / 18), "the control steps alone"
    assert measured(TIMED[:1]) == {}
    assert step_ratio(TIMED) == 1.0, "a single control step saves nothing"


def test_first_and_last_reward():
    assert first_last(STEPS) == pytest.approx({"first": 0.3, "last": 0.6, "window": "mean of an epoch"})
    one_epoch = [{"step": n, "epoch": n / 40, "reward": n - 1.0} for n in range(1, 41)]
    assert first_last(one_epoch) == {"first": 1.5, "last": 37.5, "window": "mean of 4 rollouts"}, "a reward of 0 counts"
    assert first_last([{"step": 1, "reward": None}])["last"] is None


@pytest.mark.parametrize("kept", [b"", b"\xff\xfe\x00", b"[1]", b'{"cpu": ', b'{"cpu": 1}', b"[" * 100_000])
def test_a_damaged_record_of_the_machine_is_no_record(tmp_path, kept):
    run = make_run(tmp_path / "a", STEPS)
    assert write_report(run, plots=False).summary["environment"] == MACHINE, "control: it is intact"
    (tmp_path / "a" / "environment.json").write_bytes(kept)
    assert write_report(run, plots=False).summary["environment"] is None, "this machine need not be the run's"


@pytest.mark.parametrize("line", [b"[" * 100_000, b"\xff", b"[1]", b'{"step": '])
def test_a_damaged_line_of_the_metrics_is_counted_and_left_out(tmp_path, line):
    make_run(tmp_path / "a", STEPS)
    with (tmp_path / "a" / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert (len(load_run(tmp_path / "a").steps), load_run(tmp_path / "a").unreadable) == (len(STEPS), 1)


def test_report_files(tmp_path):
    pytest.importorskip("matplotlib")
    steps = [r | {"spec/new_tokens": 30 * at, "spec/reused_tokens": 10, "spec/ties": 2} for at, r in enumerate(STEPS)]
    evals = [{"step": 0, "eval/reward": 0.1}, {"step": 2, "eval/reward": 0.3}, {"step": 4, "eval/reward": 0.6}]
    written = write_report(make_run(tmp_path / "a", [*steps, *evals]))
    assert [path.name for path in written.files] == ["report.md", "report.json", "report.png"]
    assert written.files[2].read_bytes().startswith(b"\x89PNG")
    summary = json.loads(written.files[1].read_text())
    assert summary["measured"]["savings"][6]["speedup"]["ratio"] == pytest.approx(26 / 19)
    assert summary["measured"]["title"] == "Measured on 3 control steps of 4 rollouts"
    assert summary["reuse"]["reused_ratio"] == 20 / (20 + 150), "tokens of epoch 2, weighted by their number"
    assert (summary["ties"], summary["flips"], summary["finished"], summary["notes"]) == (8, None, True, [])
    page = written.files[0].read_text()
    assert page == written.page("report.png")
    for part in ("too few to tell, 3 of the 6 steps", "reward: 0.300 -> 0.600", "at step 0: reward 0.100"):
        assert part in page


@pytest.mark.parametrize(("length", "warned"), [(101.9, False), (102.1, True), (97.9, True)])
def test_baseline_length_gap_is_warned_about(tmp_path, length, warned):
    run = make_run(tmp_path / "a", [r | {"completions/mean_length": length} for r in STEPS])
    plain = [r | {"completions/mean_length": 100.0} for r in BASELINE[:4]]
    summary = write_report(run, make_run(tmp_path / "b", plain, "off"), plots=False).summary
    assert any("difference in length" in note for note in summary["notes"]) == warned
    assert all(("mean response length" in claim) == warned for claim in summary["paired"]["claims"])
    assert summary["paired"]["savings"][6]["saved_s"] == 8.0
    assert summary["measured"]["savings"][6]["saved_s"] == 7.0


def paired_summary(tmp_path, steps=STEADY, plain=PLAIN, machine=MACHINE, **options) -> dict:
    """The summary of a run against a baseline with other records, another machine or other options."""
    run, baseline = make_run(tmp_path / "a", steps), make_run(tmp_path / "b", plain, **{"acceptance": "off"} | options)
    (tmp_path / "b" / "environment.json").write_text(json.dumps(machine))
    return write_report(run, baseline, plots=False).summary


def test_a_pair_of_equal_settings_has_a_speedup(tmp_path):
    assert paired_summary(tmp_path)["paired"]["claims"] == [
        "Speedup of the rollout, from epoch 2 on: 2.00x (95 % interval 2.00x to 2.00x)",
        "Speedup of the rollout, all these steps: 2.00x (95 % interval 2.00x to 2.00x)",
        "Speedup of the step, controls left out: 1.33x (95 % interval 1.33x to 1.33x)",
    ]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"cpu": "Slide rule"}, "cpu: Slide rule, not Abacus"),
        ({"threads": "8"}, "threads: 8, not 1"),
        ({"gpus": ["H9, 80 GiB, 1.0"]}, "gpus: [H9, 80 GiB, 1.0], not []"),
    ],
)
def test_planted_fault_a_baseline_of_another_machine_is_no_speedup(tmp_path, change, difference):
    summary = paired_summary(tmp_path, machine=MACHINE | change)
    assert "paired" not in summary
    assert any(difference in note for note in summary["notes"])


def test_planted_fault_settings_that_change_time_are_named_with_the_number(tmp_path):
    summary = paired_summary(tmp_path, rows_per_batch=1)
    assert all("(rollout.rows_per_batch: 1 -> 256): " in claim for claim in summary["paired"]["claims"])
    assert any("rollout.rows_per_batch: 1 -> 256" in note for note in summary["notes"])
    other = paired_summary(tmp_path, machine=MACHINE | {"versions": {"torch": "8"}})
    assert "(torch: 8 -> 9)" in other["paired"]["claims"][0]
    control = paired_summary(tmp_path, measure_every=0, sources=["prefix"])
    assert not any("speculation alone" in claim for claim in control["paired"]["claims"]), "no part of plain decoding"
    (tmp_path / "b" / "environment.json").unlink()
    claims = write_report(tmp_path / "a", tmp_path / "b", plots=False).summary["paired"]["claims"]
    assert all("(machine unknown): " in claim for claim in claims)


def test_a_run_that_does_not_speculate_has_no_speedup(tmp_path):
    run, baseline = make_run(tmp_path / "a", PLAIN, "off"), make_run(tmp_path / "b", PLAIN, "off")
    made = write_report(run, baseline, plots=False)
    assert made.comparisons == {}
    assert any("rollout.acceptance=off" in note for note in made.summary["notes"])
    assert "Speedup" not in made.page()


def test_a_baseline_that_speculates_is_none(tmp_path):
    summary = paired_summary(tmp_path, STEPS, BASELINE, acceptance="exact", group_size=4)
    assert "paired" not in summary
    for part in ("4 of 5 rollouts are paired", "rollout.acceptance=exact", "rollout.group_size: 4 -> 8"):
        assert any(part in note for note in summary["notes"])


def test_a_lossy_run_is_measured_against_a_baseline_only(tmp_path):
    steps = [{key: value for key, value in record.items() if key != "spec/plain_s"} for record in STEADY]
    run = make_run(tmp_path / "a", steps, "lenient", lenience=1.6)
    (note,) = write_report(run, plots=False).summary["notes"]
    assert "baseline=DIR, a run with rollout.acceptance=off" in note
    assert "measure_every" not in note
    paired_notes = write_report(run, make_run(tmp_path / "b", PLAIN, "off"), plots=False).summary["notes"]
    assert not any("No speedup was measured" in note for note in paired_notes)


# What co-training costs, and stalls -----------------------------------------------------------------------------------

# 1 s of rollout, 2 s plainly, 3 s of co-training, 1 s of update; control rows come on top.
TRAINED = [
    {"step": n, "epoch": n / 8, "timing_s/gen": 1.0, "spec/plain_s": 2.0, "timing_s/control": 2.0, "reward": 0.5}
    | {"timing_s/drafter": 3.0, "timing_s/update": 1.0, "timing_s/step": 7.0}
    for n in range(1, 17)
]


def test_co_training_is_charged_to_the_run_in_every_figure(tmp_path):
    summary = write_report(make_run(tmp_path / "a", TRAINED), plots=False).summary
    assert {row["phase"]: (row["plain_s"], row["specrl_s"]) for row in summary["measured"]["savings"]} == {
        "prefill and decode": (32.0, 16.0),
        **dict.fromkeys(("verify", "draft", "look-up", "store"), (0.0, 0.0)),
        "co-training": (0.0, 48.0),
        "rollout, from epoch 2 on": (16.0, 32.0),
        "rollout, all these steps": (32.0, 64.0),
        "reward": (0.0, 0.0),
        "update": (16.0, 16.0),
        "step, controls left out": (48.0, 80.0),
    }
    assert summary["measured"]["claims"] == [
        "Speedup of the rollout, from epoch 2 on, co-training charged: 0.50x (95 % interval 0.50x to 0.50x)",
        "Speedup of the rollout, all these steps, co-training charged: 0.50x (95 % interval 0.50x to 0.50x)",
        "Speedup of the step, controls left out, co-training charged: 0.60x (95 % interval 0.60x to 0.60x)",
    ]
    plain = [record | {"timing_s/update": 1.0, "timing_s/step": 3.0} for record in PLAIN]
    found = rows(paired(TRAINED, plain))
    assert found["co-training"] == (0.0, 48.0), "to one side of a pair"
    assert found["rollout, all these steps"] == (32.0, 64.0)
    assert found["step, controls left out"] == (48.0, 80.0)


def test_co_training_between_control_steps_is_charged_too():
    """Every other step trains the drafter, and only the others are control steps."""
    steps = [
        {key: value for key, value in r.items() if key != ("timing_s/drafter", "spec/plain_s")[r["step"] % 2]}
        | {"timing_s/step": 4.0 if r["step"] % 2 == 0 else 5.0}
        for r in TRAINED
    ]
    assert measured(steps)["rollout, all these steps"].speedup.ratio == pytest.approx(2 / (1 + 1.5))
    assert step_ratio(steps) == pytest.approx((2 + 1) / (1 + 1.5 + 1))


def test_saving_the_cache_between_two_steps_is_charged():
    saved = [record | {"timing_s/cache_save": 0.5} for record in STEADY]
    assert measured(saved)["rollout, all these steps"].speedup.ratio == pytest.approx(2.0 / (1.0 + 0.5))
    assert step_ratio(saved) == pytest.approx((3.0 - 1.0 + 2.0) / (3.0 + 0.5))


def minibatches(gen: float, plain: float | None = None) -> list[dict]:
    """8 rollouts with 4 optimiser steps each, recorded as config=ppo_gsm8k does: only the first step has a reward."""
    steps = []
    for n in range(1, 33):
        first = n % 4 == 1
        took = {"timing_s/update": 3.0, "timing_s/step": 3.0 + (gen + (plain or 0.0)) * first}
        rollout = {"timing_s/gen": gen, "reward": 0.5}
        control = {"spec/plain_s": plain, "timing_s/control": plain} if plain else {}
        steps.append({"step": n, "epoch": n / 16, **took, **((rollout | control) if first else {})})
    return steps


def test_every_optimiser_step_is_charged(tmp_path):
    """Updates of 4 * 3 s, rollouts of 2 s against 4 s: (12 + 4) / (12 + 2) = 1.14, and not (3 + 4) / (3 + 2) = 1.40."""
    run = make_run(tmp_path / "a", minibatches(2.0, 4.0))
    baseline = make_run(tmp_path / "b", minibatches(4.0), "off")
    report = write_report(run, baseline, plots=False)
    for kind in ("paired", "measured"):
        assert report.summary[kind]["savings"][-1]["speedup"]["ratio"] == pytest.approx(16 / 14)
    assert report.summary["steps"] == 32
    assert sum(report.summary["step_s"].values()) == pytest.approx(8 * 14.0)
    assert report.summary["measured"]["title"].startswith("Measured on 8 control steps of 8 rollouts")
    assert report.summary["reward"]["last"] == 0.5
    assert first_last(minibatches(2.0)[:16])["last"] == 0.5, "the last step has no reward of its own"
    planted = [record for record in minibatches(2.0, 4.0) if "timing_s/gen" in record]
    assert step_ratio(planted) == pytest.approx(7 / 5)


@pytest.mark.slow  # a run
def test_the_report_of_a_run_with_minibatches_has_all_of_its_seconds():
    done = recorded(config="ppo_math", trainer__minibatches=2, rollout__measure_every=2, **SHORT)
    run = load_run(done.folder)
    records = [record for record in read_records(done.folder / "metrics.jsonl")[0] if "timing_s/step" in record]
    assert len(run.steps) == len(records) == 2 * len(rollouts(run.steps))
    whole = sum(record["timing_s/step"] + record.get("timing_s/cache_save", 0.0) for record in records)
    controls = sum(record.get(f"timing_s/{name}", 0.0) for record in records for name in ("control", "reuse_gap"))
    assert step_s(rollouts(run.steps)) == pytest.approx(whole - controls)


def test_planted_fault_one_stalled_step_makes_no_figure(tmp_path):
    even = [record | {"timing_s/gen": 2.0, "timing_s/step": 6.0} for record in STEADY]
    stalled = [*even[:9], even[9] | {"spec/plain_s": 70.0, "timing_s/control": 70.0, "timing_s/step": 74.0}, *even[10:]]
    summary = write_report(make_run(tmp_path / "a", stalled), plots=False).summary
    assert [row["saved_s"] for row in summary["measured"]["savings"]] == [0.0] * 10
    assert all("not distinguishable from 1x" in claim for claim in summary["measured"]["claims"])
    slow = [*PLAIN[:9], PLAIN[9] | {"timing_s/gen": 70.0, "timing_s/step": 72.0}, *PLAIN[10:]]
    evidence = paired_summary(tmp_path, even, slow)["paired"]
    assert [row["saved_s"] for row in evidence["savings"]] == [0.0] * 10
    assert all("not distinguishable from 1x" in claim for claim in evidence["claims"])


def test_unfinished_run_without_control_steps_or_config(tmp_path):
    plain = [{"step": 1, "epoch": 0.5, "timing_s/gen": 2.0, "reward": None}]
    made = write_report(make_run(tmp_path / "a", plain, epochs=3), plots=False)
    assert made.comparisons == {}
    assert made.summary["finished"] is False
    for note, part in zip(made.summary["notes"], ("unfinished", "rollout.measure_every=10", "epoch 2"), strict=True):
        assert part in note
    (tmp_path / "a" / "config.yaml").unlink()
    page = write_report(tmp_path / "a", plots=False).page()
    assert "config.yaml is missing" in page
    assert "lossy" not in page, "the rule is unknown"


def test_flips_lost_rewards_and_torn_lines_are_noted(tmp_path):
    flipped = {"spec/control_mismatches": 2, "spec/compared_tokens": 500, "spec/flip_position": 120.0}
    run = make_run(tmp_path / "a", [*STEPS[:3], STEPS[3] | flipped | {"reward/failed": 1}])
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    notes = write_report(run, plots=False).summary["notes"]
    for note, part in zip(notes, ("1 unreadable line", "in float32 4 of 1,000 tokens", "1 response "), strict=True):
        assert part in note


def test_without_matplotlib_a_note_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    made = write_report(make_run(tmp_path / "a", STEPS))
    assert made.summary["notes"] == [NO_PLOT]
    assert "report.png)" not in made.files[0].read_text()
    assert len(made.files) == 2


def test_command_line(tmp_path, capsys):
    run = make_run(tmp_path / "a", STEPS)
    assert run_command(report.main, [f"run={run}", "plots=false"], ReportOptions) == 0
    assert "3 control steps of 4 rollouts" in capsys.readouterr().out
    for words, part in (
        ([f"run={tmp_path / 'b'}"], f"No run at {tmp_path / 'b'}."),
        ([], "run=outputs/grpo_math"),
        ([f"path={run}"], "Unknown option 'path'."),
    ):
        assert run_command(report.main, words, ReportOptions) == 2
        assert part in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"Did you mean .*a\?"):
        write_report(tmp_path / "aa")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="No metrics in"):
        write_report(tmp_path / "empty")


# Rollouts ahead -------------------------------------------------------------------------------------------------------

AHEAD = [
    {"step": n, "epoch": n / 4, "timing_s/gen": 0.5, "timing_s/step": 2.0, "timing_s/ahead": 1.6, "reward": 0.5}
    | {"spec/ahead_ratio": 0.8, "spec/ahead_done_ratio": 0.75, "spec/ahead_unchanged_ratio": 0.5}
    for n in range(1, 9)
]
AHEAD[4] |= {"spec/plain_s": 3.0, "timing_s/control": 3.0, "timing_s/step": 5.0}
WITHOUT = [{"step": n, "epoch": n / 4, "timing_s/gen": 1.0, "timing_s/step": 2.4} for n in range(1, 9)]


def test_rollouts_ahead_by_hand(tmp_path):
    run = load_run(make_run(tmp_path / "a", AHEAD))
    alone = ahead(run, None)
    assert [alone[f"ahead_{key}"] for key in ("ratio", "done_ratio", "unchanged_ratio")] == [0.8, 0.75, 0.5]
    assert "rollout.ahead=off" in alone["sentence"]
    compared = ahead(run, load_run(make_run(tmp_path / "off", WITHOUT, ahead="off")))
    assert compared["step"]["speedup"]["ratio"] == pytest.approx(1.2)
    assert "1.20x (95 % interval 1.20x to 1.20x)" in compared["sentence"]
    stopped = [{**record, "timing_s/step": 2.0} for record in WITHOUT[:4]]
    slower_later = [{**record, "timing_s/step": 2.0 if record["step"] <= 4 else 6.0} for record in AHEAD]
    early = ahead(
        load_run(make_run(tmp_path / "d", slower_later)), load_run(make_run(tmp_path / "e", stopped, ahead="off"))
    )
    assert (early["step"]["specrl_s"], early["step"]["plain_s"]) == (6.0, 6.0), "steps that both have"
    assert "too few to tell" in early["sentence"]
    also_ahead = load_run(make_run(tmp_path / "on", WITHOUT))
    assert "step" not in ahead(run, also_ahead)
    (tmp_path / "off" / "environment.json").write_text(json.dumps(MACHINE | {"cores": 64}))
    assert "step" not in ahead(run, load_run(tmp_path / "off")), "another machine"


def test_a_run_ends_with_advice_on_its_drafts(tmp_path):
    pays = write_report(make_run(tmp_path / "pays", STEADY), plots=False)
    assert pays.summary["advice"]["pays"]
    seen = {"entropy": 1.5, "spec/paused_acceptance": 0.25, "spec/paused_needed": 0.4}
    slow = write_report(
        make_run(tmp_path / "slow", [step | {"spec/plain_s": 1.0} | seen for step in STEADY]), plots=False
    )
    assert not slow.summary["advice"]["pays"]
    assert all(number in slow.page() for number in ("1.50 nats", "0.25", "0.40")), "what was accepted, and what pays"
    assert f"specrl.bench config={tmp_path / 'slow' / 'config.yaml'}" in slow.page()
    assert write_report(make_run(tmp_path / "short", STEADY[:4]), plots=False).summary["advice"] is None


def test_the_rewards_of_runs_with_equal_seeds_are_compared_step_by_step(tmp_path):
    """Differences 0.1, 0.3, 0.1, 0.3 ...: blocks of 1, 1, 2, 1, 1 and 2 steps, whose deviations are 0.1 or 0."""
    rewards = [0.5 + 0.1 * (1 + 2 * (i % 2)) for i in range(8)]
    steps = [STEADY[0] | {"step": i + 1, "reward": reward} for i, reward in enumerate(rewards)]
    plain = [record | {"reward": 0.5} for record in steps]
    found = paired_summary(tmp_path, steps, plain)["reward_difference"]
    half = 2.571 * (6 / 5 * (4 * 0.1**2)) ** 0.5 / 8
    assert (found["mean"], found["n"]) == (pytest.approx(0.2), 8)
    assert (found["low"], found["high"]) == (pytest.approx(0.2 - half, abs=1e-3), pytest.approx(0.2 + half, abs=1e-3))
    assert "+0.200 (95 % interval" in found["sentence"]
    config = tmp_path / "b" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 1"))
    assert write_report(str(tmp_path / "a"), str(tmp_path / "b"), plots=False).summary["reward_difference"] is None
