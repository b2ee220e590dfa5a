"""The soak: its checks on made-up series, and a short one of a real run."""

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.runs import ROOT, build_policy

sys.path.append(str(ROOT / "benchmarks"))
from soak_checks import BOUNDS, Sample, disagreements, excesses, leaks

FLAT = Sample(0, 700.0, 90.0, 30, 8, 2, 40.0, 14.0)


def series(steps=400, **slopes):
    """A noisy process whose gauges rise by `slopes` a step; its memory also fills in the first tenth of the steps."""
    rng = random.Random(0)
    for step in range(1, steps + 1):
        rises = {name: getattr(FLAT, name) + slope * step for name, slope in slopes.items()}
        rises["rss_mb"] = rises.get("rss_mb", 700) + min(step, steps / 10) + rng.gauss(0, 5)
        yield replace(FLAT, step=step, **rises)


@pytest.mark.parametrize("name", BOUNDS)
def test_slow_growth_is_found_in_every_series(name):
    constant, rate = BOUNDS[name]
    slope = (constant + 8 + rate * 4) / 300  # a step
    assert [text.split()[0] for text in leaks(list(series(**{name: slope})))] == [name]


def test_too_little_to_judge_is_a_finding():
    assert leaks([]) == leaks(list(series(steps=4))) == ["too few steps were sampled to judge growth"]
    assert leaks([replace(s, checkpoint_mb=0.0) for s in series()]) != [], "no checkpoint was ever seen"


def test_gauges_beyond_the_quiet_run_and_a_full_disk_are_found():
    high = [*series(), replace(FLAT, step=7, files=90, disk_mb=80.0)]
    assert [text.split()[0] for text in excesses(high, list(series()), 60)] == ["files", "disk_mb"]


def test_records_are_compared_step_by_step():
    due = [{"step": n, "loss": 0.1 * n, "reward": 1.0, "timing_s/gen": 1.0, "time": n} for n in (1, 2, 3)]
    assert disagreements(due, [r | {"timing_s/gen": 9.0, "time": 0, "spec/ties": 1} for r in due]) == []
    assert "missing [2]" in disagreements(due, [due[0], due[2]])[0]
    assert "double [2]" in disagreements(due, [due[0], due[1], due[1], due[2]])[0]
    assert disagreements(due, [due[1], due[0], due[2]]) != []
    other = [due[0], due[1] | {"reward": 0.5}, {k: v for k, v in due[2].items() if k != "loss"}]
    assert disagreements(due, other) == ["step 2 differs in reward", "step 3 differs in loss"]


@pytest.mark.long
def test_a_short_soak(tmp_path):
    """Deaths; the leaking control is part of every soak."""
    words = [f"out={tmp_path / 'out'}", "steps=12", "every=4", "seed=5", f"model={build_policy(tmp_path / 'policy')}"]
    words += ["config=ppo_math", "faults=kill", "trainer.save_every=2"]
    words += ["trainer.learning_rate=1e-3"]
    done = subprocess.run([sys.executable, "benchmarks/soak.py", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["violations"] == []
    assert {"kill", "illegal_change"} <= set(summary["struck"])
    assert {text.split()[0] for text in summary["control: found"]} >= {"workers_mb", "processes"}
