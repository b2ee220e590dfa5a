import io
import json
import sys

import pytest
from rich.console import Console

from rollout.config import RouterConfig
from specrl import report
from specrl.card import card
from specrl.config import Config, load_saved, save
from specrl.config import run as run_command
from specrl.monitor import RunError
from specrl.report import ReportOptions, write_report
from specrl.savings import (
    Saving,
    breakdown,
    estimate,
    first_last,
    measured,
    paired,
    phases,
    step_s,
    step_speedup,
)

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


def rows(savings: list[Saving]) -> dict[str, tuple[float, float]]:
    return {saving.phase: (saving.plain_s, saving.specrl_s) for saving in savings}


def make_run(path, steps, acceptance="exact", epochs=2, **options) -> str:
    config = Config(name=path.name, output_dir=str(path.parent))
    config.rollout.acceptance, config.trainer.epochs = acceptance, epochs
    for key, value in options.items():
        setattr(config.rollout, key, value)
    save(config)
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in steps))
    return str(path)


def test_measured_savings_by_hand():
    assert rows(measured(STEPS)) == {
        "prefill and decode": (29.0, 14.5),
        "verify": (0.0, 3.0),
        "draft": (0.0, 1.0),
        "look-up": (0.0, 0.25),
        "store": (0.0, 0.25),
        "rollout, from epoch 2 on": (20.0, 9.0),
        "rollout, all these steps": (29.0, 19.0),
    }


def test_saving_formulas_by_hand():
    saving = Saving("rollout", plain_s=20.0, specrl_s=8.0)
    assert (saving.saved_s, saving.share, saving.speedup) == (12.0, 0.6, 2.5)
    assert saving.cells() == ("rollout", "20.0", "8.0", "12.0", "60%")
    assert Saving("verify", 0.0, 3.0).cells() == ("verify", "0.0", "3.0", "-3.0", "")


def test_phases_add_up_so_the_total_is_net():
    parts, whole = measured(STEPS)[:-2], measured(STEPS)[-1]
    assert sum(part.saved_s for part in parts) == pytest.approx(whole.saved_s) == 10.0


def test_negative_control_gen_without_verification_gives_other_numbers():
    uncharged = [r | {"timing_s/gen": r["timing_s/gen"] - r.get("timing_s/verify", 0.0)} for r in STEPS]
    assert measured(uncharged)[-1].saved_s == 13.0
    with pytest.raises(AssertionError):
        assert rows(measured(uncharged)) == rows(measured(STEPS))
    forgotten = [{key: value for key, value in r.items() if key != "timing_s/verify"} for r in STEPS]
    assert rows(measured(forgotten))["prefill and decode"] == (29.0, 17.5), "time of an unnamed phase is not lost"
    assert measured(forgotten)[-1].saved_s == 10.0


def test_speedup_is_a_ratio_of_sums_not_a_mean_of_ratios():
    total = measured(STEPS)[-1]
    assert total.speedup == pytest.approx(29 / 19)
    assert total.speedup != pytest.approx((9 / 10 + 12 / 5 + 8 / 4) / 3)


def test_paired_savings_by_hand_match_step_by_step():
    own = [r | {"timing_s/update": 3.0, "timing_s/step": r["timing_s/gen"] + 5} for r in STEPS[::-1]]
    own[0] |= {"timing_s/control": 8.0, "timing_s/step": 4.0 + 5 + 8}
    assert rows(paired(own, BASELINE)) == {
        "prefill and decode": (40.0, 24.5),
        "verify": (0.0, 3.0),
        "draft": (0.0, 1.0),
        "look-up": (0.0, 0.25),
        "store": (0.0, 0.25),
        "rollout, from epoch 2 on": (20.0, 9.0),
        "rollout, all these steps": (40.0, 29.0),
        "reward": (0.0, 0.0),
        "update": (12.0, 12.0),
        "step, controls left out": (60.0, 49.0),
    }
    assert paired(STEPS, BASELINE[4:]) == []


TIMED = [
    {"timing_s/step": 20.0, "timing_s/gen": 8.0, "timing_s/update": 9.0, "timing_s/reward": 2.0},
    {"timing_s/step": 30.0, "timing_s/gen": 6.0, "timing_s/update": 7.0, "timing_s/ref_log_prob": 3.0}
    | {"timing_s/control": 10.0, "timing_s/reuse_gap": 2.0, "spec/plain_s": 15.0},
]


def test_where_a_step_goes_by_hand():
    spent = breakdown(TIMED)
    assert spent == {"gen": 14.0, "reward": 2.0, "ref_log_prob": 3.0, "update": 16.0, "other": 3.0}
    assert sum(spent.values()) == step_s(TIMED) == 38.0, "control rows are left out"
    assert breakdown(STEPS) == {}


def test_whole_steps_against_plain_rollouts_by_hand():
    assert step_speedup(TIMED) == pytest.approx((18 - 6 + 15) / 18), "the control step alone"
    assert step_speedup(TIMED[:1]) is None
    assert step_speedup(TIMED) != pytest.approx((30 - 6 + 15) / 30)  # control: its control rows charged to both sides


def test_the_page_says_where_a_step_goes(tmp_path):
    steps = [{**record, **timed} for record, timed in zip(STEPS[1:3], TIMED, strict=True)]
    (tmp_path / "timed").mkdir()
    page = write_report(make_run(tmp_path / "timed", steps), plots=False).markdown
    assert "| gen | 7.00 | 37% |" in page
    assert "| step, controls left out | 19.00 | 100% |" in page
    assert "Whole steps on the control steps, against plain rollouts: 1.50x." in page


def test_estimate_extrapolates_epoch_one_apart():
    assert estimate(STEPS) == pytest.approx(20 * (9 / 10 - 1) + 9 * (20 / 9 - 1)) == pytest.approx(9.0)
    no_first = [{key: value for key, value in STEPS[0].items() if key != "spec/plain_s"}, *STEPS[1:]]
    assert estimate(no_first) == pytest.approx(11.0)
    assert estimate([{**record, "timing_s/drafter": 0.5} for record in STEPS]) == pytest.approx(
        9.0 - 0.5 * len(STEPS)
    ), "co-training is charged"
    assert estimate(STEPS[:2]) is None


def test_first_and_last_reward():
    assert first_last(STEPS) == pytest.approx({"first": 0.3, "last": 0.6, "window": "mean of an epoch"})
    one_epoch = [{"step": n, "epoch": n / 40, "reward": float(n)} for n in range(1, 41)]
    assert first_last(one_epoch) == {"first": 2.5, "last": 38.5, "window": "mean of 4 step(s)"}
    assert first_last([{"step": 1, "reward": None}])["last"] is None


def test_phases_of_a_plain_run():
    assert phases(BASELINE[:1]) == {"prefill and decode": 11.0, "verify": 0, "draft": 0, "look-up": 0, "store": 0}


def test_report_files(tmp_path):
    steps = [r | {"spec/new_tokens": 30 * at, "spec/reused_tokens": 10, "spec/ties": 2} for at, r in enumerate(STEPS)]
    evals = [{"step": 0, "eval/reward": 0.1}, {"step": 2, "eval/reward": 0.3}, {"step": 4, "eval/reward": 0.6}]
    run = make_run(tmp_path / "a", [*steps, *evals])
    written = write_report(run)
    assert [path.name for path in written.files] == ["report.md", "report.json", "report.png"]
    assert written.files[2].read_bytes().startswith(b"\x89PNG")
    summary = json.loads(written.files[1].read_text())
    assert summary["measured"]["savings"][-1]["speedup"] == pytest.approx(29 / 19)
    assert summary["measured"]["title"] == "(a) Measured on 3 control step(s) of 4, 0.90x to 2.40x on single steps"
    assert summary["reuse"]["reused_ratio"] == 20 / (20 + 150), "tokens of epoch 2, weighted by their number"
    assert (summary["ties"], summary["control_mismatches"], summary["finished"], summary["notes"]) == (8, 0, True, [])
    assert {"torch", "trl", "python"} <= set(summary["environment"]["versions"])
    text = written.files[0].read_text()
    assert text == written.markdown
    for part in (
        "Speedup: 2.22x rollout, from epoch 2 on; 1.53x rollout, all these steps.",
        "Estimate, extrapolated from these to all 4 steps: 9.0 s saved.",
        "reward: 0.300 -> 0.600 (mean of an epoch)",
        "evaluation before, at step 0: reward 0.100\n- evaluation after, at step 4: reward 0.600",
        "exact, replay=0: the tokens plain decoding draws",
        "![reward, rollout seconds and reuse per step](report.png)",
    ):
        assert part in text


def test_report_shows_tables_and_the_path(tmp_path):
    console = Console(record=True, width=200, file=io.StringIO())
    write_report(make_run(tmp_path / "a", STEPS), plots=False).show(console)
    shown = console.export_text()
    assert "Speedup: 2.22x rollout, from epoch 2 on; 1.53x rollout, all these steps." in shown
    assert "reward: 0.300 -> 0.600" in shown
    assert f"report: {tmp_path / 'a' / 'report.md'}" in shown


@pytest.mark.parametrize(("length", "warned"), [(101.9, False), (102.1, True), (97.9, True)])
def test_baseline_length_gap_is_warned_about(tmp_path, length, warned):
    run = make_run(tmp_path / "a", [r | {"completions/mean_length": length} for r in STEPS])
    plain = [r | {"completions/mean_length": 100.0} for r in BASELINE[:4]]
    summary = write_report(run, make_run(tmp_path / "b", plain, "off"), plots=False).summary
    assert any("difference in length" in note for note in summary["notes"]) == warned
    assert summary["paired"]["savings"][6]["saved_s"] == 11.0
    assert summary["measured"]["savings"][6]["saved_s"] == 10.0


def test_baseline_that_is_not_comparable_is_named(tmp_path):
    run = make_run(tmp_path / "a", STEPS)
    notes = write_report(run, make_run(tmp_path / "b", BASELINE, group_size=4), plots=False).summary["notes"]
    assert "4 steps are paired, of 4 here and 5 there." in notes
    assert "The baseline did not decode plainly: its rollout.acceptance is exact." in notes
    assert "The runs differ in more than the rollout rule: rollout.group_size: 4 -> 8." in notes


def test_unfinished_run_without_control_steps_or_config(tmp_path):
    plain = [{"step": 1, "epoch": 0.5, "timing_s/gen": 2.0, "reward": None}]
    made = write_report(make_run(tmp_path / "a", plain, epochs=3))
    assert made.tables == {}
    assert made.summary["finished"] is False
    assert made.summary["notes"] == [
        "The run is unfinished; its last step is 1.",
        "No control steps, so no speedup was measured. rollout.measure_every sets them.",
        "There is no step from epoch 2 on, and only from there can text be reused.",
    ]
    (tmp_path / "a" / "config.yaml").unlink()
    assert "config.yaml is missing" in write_report(tmp_path / "a", plots=False).markdown


def test_mismatches_lost_rewards_and_torn_lines_are_said(tmp_path):
    run = make_run(tmp_path / "a", [*STEPS[:3], STEPS[3] | {"spec/control_mismatches": 2, "reward/failed": 1}])
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    assert write_report(run, plots=False).summary["notes"] == [
        "1 unreadable line(s) of metrics.jsonl were left out.",
        "2 row(s) differed from plain decoding on control steps; they were not exact.",
        "1 response(s) got no reward and were left out of their groups.",
    ]


@pytest.mark.parametrize(
    ("acceptance", "options", "sentence"),
    [
        ("exact", {}, "on-policy RL"),
        ("exact", {"replay": 0.5}, "spec/reuse_gap measures"),
        ("lenient", {"lenience": 1.6}, "l=1.6: SPEC-RL as published; biased"),
        ("off", {}, "plain decoding without speculation"),
        ("judged", {"router": RouterConfig(kind="judge")}, "lossy: old text stands where"),
        ("off", {"router": RouterConfig(kind="rsd")}, "lossy: the draft model's text stands where"),
    ],
)
def test_law_names_the_rule(tmp_path, acceptance, options, sentence):
    run = make_run(tmp_path / "a", STEPS, acceptance, **options)
    assert sentence in write_report(run, plots=False).summary["rule"]


def test_without_matplotlib_a_note_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    made = write_report(make_run(tmp_path / "a", STEPS))
    assert made.summary["notes"] == [report.NO_PLOT]
    assert "report.png)" not in made.markdown
    assert len(made.files) == 2


def test_environment_of_the_run_wins(tmp_path):
    run = make_run(tmp_path / "a", STEPS)
    kept = {"cpu": "Abacus", "cores": 1, "gpus": ["H9"], "versions": {"torch": "9"}}
    (tmp_path / "a" / "environment.json").write_text(json.dumps(kept))
    assert "- CPU: Abacus, 1 cores\n- GPU: H9\n- versions: torch 9" in write_report(run, plots=False).markdown


def test_command_line(tmp_path, capsys):
    run = make_run(tmp_path / "a", STEPS)
    assert run_command(report.main, [f"run={run}", "plots=false"], ReportOptions) == 0
    assert "control step(s)" in capsys.readouterr().out
    assert run_command(report.main, [f"run={tmp_path / 'b'}"], ReportOptions) == 2
    assert f"No run at {tmp_path / 'b'}." in capsys.readouterr().err
    assert run_command(report.main, [], ReportOptions) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="No metrics in"):
        write_report(tmp_path / "empty")
