"""Runs side by side: the numbers of the table by hand, what sets the runs apart, and what cannot be compared."""

import io
import json

import pytest
from rich.console import Console

from specrl import report
from specrl.config.load import run as run_command
from specrl.config.load import save
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.report import ReportOptions
from specrl.results.compare import write_comparison

# Two steps an epoch; steps 2, 3 and 4 are control steps, too few for a speedup.
STEPS = [
    {"step": 1, "epoch": 0.5, "timing_s/gen": 9.0, "timing_s/step": 12.0, "reward": 0.2},
    {"step": 2, "epoch": 1.0, "timing_s/gen": 9.0, "timing_s/step": 22.0, "reward": 0.4}
    | {"spec/plain_s": 9.0, "timing_s/control": 10.0},
    {"step": 3, "epoch": 1.5, "timing_s/gen": 5.0, "timing_s/step": 8.0, "reward": 0.5}
    | {"spec/plain_s": 12.0, "spec/passes_per_row": 6.0, "spec/reuse_gap": 0.04, "spec/reused_ratio": 0.8},
    {"step": 4, "epoch": 2.0, "timing_s/gen": 5.0, "timing_s/step": 8.0, "reward": 0.7}
    | {"spec/plain_s": 8.0, "spec/passes_per_row": 4.0, "spec/reuse_gap": 0.02, "spec/reused_ratio": 0.9},
]
EVALS = [{"step": 0, "eval/reward": 0.1}, {"step": 4, "eval/reward": 0.6}]
PLAIN = [{key: r[key] for key in ("step", "epoch", "timing_s/gen", "timing_s/step", "reward")} for r in STEPS]


def make_run(path, records, **options) -> str:
    config = Config(name=path.name, output_dir=str(path.parent))
    config.trainer.epochs = 2
    for key, value in options.items():
        setattr(config.rollout, key, value)
    save(config)
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def pair(tmp_path):
    one = make_run(tmp_path / "one", [*STEPS, *EVALS], replay=0.5)
    return one, make_run(tmp_path / "two", PLAIN, acceptance="off")


def test_the_column_of_a_run_by_hand(pair):
    columns = write_comparison(pair, plots=False).columns
    assert columns["one"] == {
        "rule": "exact, replay=0.5",
        "steps": "4",
        "reward": "0.300 -> 0.600",
        "held-out": "0.100 -> 0.600",
        "speedup": "-",
        "passes a row": "5.0",
        "reuse gap": "+0.030",
        "rollout s": "28.0",
        "step s": "40.0",
    }
    measured = [columns["two"][row] for row in ("rule", "held-out", "speedup", "passes a row", "reuse gap")]
    assert measured == ["off", "-", "-", "-", "-"], "nothing is made up for what was not measured"


def test_the_speedup_is_an_interval_and_rollout_seconds_include_co_training(tmp_path):
    steps = [{"step": n, "epoch": 2.0, "timing_s/gen": 1.0, "spec/plain_s": 3.0, "reward": 0.5} for n in range(1, 7)]
    steps[2] |= {"spec/plain_s": 2.0}
    trained = [record | {"timing_s/drafter": 1.0} for record in steps]
    made = [make_run(tmp_path / "one", steps), make_run(tmp_path / "two", trained)]
    columns = write_comparison(made, plots=False).columns
    # R = 17/6; s = sqrt((1/36 * 5 + 25/36) / 5) = 0.408; half = 2.571 * 0.408 * sqrt(6) / 6 * 6/5 = 0.514
    assert [columns[name]["speedup"] for name in columns] == ["2.32x to 3.35x", "1.16x to 1.67x"]
    assert [columns[name]["rollout s"] for name in columns] == ["6.0", "12.0"]


def test_runs_of_unlike_machines_are_said(pair, tmp_path):
    for name, cores in (("one", 2), ("two", 64)):
        machine = {"cpu": "Abacus", "cores": cores, "gpus": [], "versions": {}}
        (tmp_path / name / "environment.json").write_text(json.dumps(machine))
    said = "two ran on another machine than one: cores: 64, not 2. Seconds do not compare."
    assert said in write_comparison(pair, plots=False).notes


def test_negative_control_control_rows_charged_to_the_run_would_be_seen(pair):
    charged = sum(record["timing_s/step"] for record in STEPS)
    assert write_comparison(pair, plots=False).columns["one"]["step s"] != f"{charged:.1f}" == "50.0"


def test_what_sets_the_runs_apart_is_listed(pair):
    notes = write_comparison(pair, plots=False).notes
    assert notes == ["rollout.acceptance: exact, off", "rollout.replay: 0.5, 0.0"]


def test_unfinished_mismatching_and_unknown_runs_are_said(tmp_path):
    flipped = {"spec/control_mismatches": 1, "spec/compared_tokens": 80, "spec/flip_position": 9.0}
    one = make_run(tmp_path / "one", [*STEPS[:2], STEPS[2] | flipped])
    two = make_run(tmp_path / "two", PLAIN)
    (tmp_path / "two" / "config.yaml").unlink()
    made = write_comparison([one, two], plots=False)
    assert made.columns["two"]["rule"] == "unknown"
    assert made.notes == [
        "one is unfinished; its last step is 3.",
        "one: on control steps in float32 12 of 1,000 tokens come out otherwise than in plain decoding (1 row, after 9 "
        "tokens on average): rounding, as between any two batch sizes of the same engine. The law is unchanged.",
        "two has no readable config.yaml, so what sets it apart is unknown.",
    ]


def test_files_beside_the_first_run(pair, tmp_path):
    pytest.importorskip("matplotlib")
    page, picture = write_comparison(pair).files
    assert (page, picture) == (tmp_path / "comparison.md", tmp_path / "comparison.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    for part in ("| | one | two |", "| rule | exact, replay=0.5 | off |", "(comparison.png)", "replay: 0.5, 0.0"):
        assert part in text


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    made = [make_run(tmp_path / place / "same", PLAIN) for place in ("a", "b")]
    assert list(write_comparison(made, plots=False).columns) == made


def test_what_cannot_be_compared(pair, tmp_path):
    with pytest.raises(ConfigError, match="two or more different runs"):
        write_comparison([pair[0], pair[0]])
    with pytest.raises(ConfigError, match=r"No run at .*tow\. Did you mean .*two\?"):
        write_comparison([pair[0], tmp_path / "tow"])


def test_command_line(pair, capsys):
    assert run_command(report.main, [f"runs=[{','.join(pair)}]", "plots=false"], ReportOptions) == 0
    assert "comparison: " in capsys.readouterr().out
    for words in ([], [f"run={pair[0]}", f"runs=[{pair[0]}]"], [f"runs=[{','.join(pair)}]", f"baseline={pair[0]}"]):
        assert run_command(report.main, words, ReportOptions) == 2
        assert "Give one of run=DIR" in capsys.readouterr().err


def test_the_table_on_the_console(pair):
    console = Console(record=True, width=200, file=io.StringIO())
    write_comparison(pair, plots=False).show(console)
    shown = console.export_text()
    for part in ("exact, replay=0.5", "0.300 -> 0.600", "note: rollout.replay: 0.5, 0.0"):
        assert part in shown
