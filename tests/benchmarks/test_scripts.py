"""Benchmark scripts run to their end at their smallest size. Those of benchmarks/research: test_research.py."""

import json
import subprocess
import sys
from functools import partial
from importlib import import_module

import pytest

from specrl.config import load as cli
from specrl.rollout.drafting.budget import Budget
from tests.runs import ROOT

pytestmark = pytest.mark.long


def figures(out):
    return json.loads(out.read_text())


def run(script, out, *words):
    """The figures of a script that ran to its end in a process of its own."""
    command = [sys.executable, "-m", f"benchmarks.{script}", *words, f"out={out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return figures(out)


def test_rivals(monkeypatch, tmp_path):
    pytest.importorskip("vllm")
    from benchmarks import process, rivals
    from benchmarks.paired import PairConfig

    monkeypatch.setitem(process.USERS, "TORCH_COMPILE_DISABLE", "1")  # a user's vLLM compiles, for half a minute

    monkeypatch.setattr(rivals, "METHODS", {"": "vLLM"})  # each is a process of its own
    words = ["config=grpo_math_vllm", "rows=8", "repeats=1", "rollout.max_new_tokens=8", f"out={tmp_path / 'out.json'}"]
    assert cli.run(rivals.main, words, PairConfig, training=False) == 0
    methods = {line["method"]: line for line in figures(tmp_path / "out.json")["methods"]}
    assert methods["specrl exact, replay 0"]["identical"] == 8
    assert methods["vLLM"]["speedup"] == 1.0


def test_ahead(tmp_path):
    pytest.importorskip("ray")
    small = ["repeats=1", "trainer.epochs=2", "dataset.train_size=8", "rollout.max_new_tokens=16"]
    line = run("ahead", tmp_path / "out.json", *small)["epochs"][-1]
    assert (line["epoch"], line["steps"]) == ("all", 2)
    assert line["auto"]["ahead"] > 0
    assert "ahead" not in line["off"]


def test_real_on_a_simulated_gpu(tmp_path):
    """Its seconds are those of passes alone: more of them take longer, by as much in each run."""
    small = ["config=grpo_math", "gpu=1.5B", "temperatures=[1.0]", "rows=8", "repeats=1", "rollout.max_new_tokens=24"]
    (line,) = run("real", tmp_path / "out.json", *small)["lines"]
    pass_s = 2 * 1.54e9 / 3.0e12 + 1.5e-3
    for timing in line["timings"]:
        assert timing["passes"] < timing["plain_passes"] == 24
        assert timing["plain_s"] == pytest.approx(24 * pass_s, rel=0.1), "with the prompts' pass and the KV"
        assert timing["speedup"] == pytest.approx(timing["plain_s"] / timing["specrl_s"])
        assert timing["differing_rows"] == 0
    assert [rule["lenience"] for rule in line["published"]] == [1.0, 1.65]


def test_real_on_this_machine(tmp_path):
    small = [
        "config=grpo_math",
        "temperatures=[1.0]",
        "rows=8",
        "repeats=2",
        "rollout.max_new_tokens=24",
        "lenience=[1]",
    ]
    (line,) = run("real", tmp_path / "out.json", *small)["lines"]
    assert [rule["lenience"] for rule in line["published"]] == [1.0]
    for timing in line["timings"]:
        assert timing["passes"] < timing["plain_passes"] == 24
        assert timing["differing_rows"] == 0


def test_fill(tmp_path):
    small = ["dataset.train_size=8", "trainer.prompts_per_step=2", "trainer.epochs=1", "rollout.max_new_tokens=24"]
    lines = {line["fill"]: line for line in run("fill", tmp_path / "out.json", *small, "fills=[0,64]")["lines"]}
    assert lines["plain"]["ahead"] == lines["0"]["ahead"] == 0
    assert lines["64"]["ahead"] > 0
    assert lines["64"]["seconds"] < lines["0"]["seconds"] <= lines["plain"]["seconds"]


def test_timeline(tmp_path):
    """The documented picture, from the kept figures."""
    from benchmarks import timeline

    run, out = ROOT / "benchmarks" / "results" / "ahead-small.json", tmp_path / "out.png"
    assert cli.run(timeline.main, [f"run={run}", "epoch=1", f"out={out}"], timeline.TimelineConfig) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def here(module, schema, out, *words):
    """Runs a script in this process, as its command would."""
    script = import_module(f"benchmarks.{module}")
    given = {word.partition("=")[0] for word in words}
    settings = [f"{key}={value}" for key, value in script.SETTINGS.items() if key not in given]
    words = [*settings, *words, f"out={out}"]
    assert cli.run(partial(script.main, words=words), words, getattr(script, schema)) == 0
    return figures(out)


def test_twins(tmp_path, monkeypatch):
    for name in ("calibrate", "observe_pass"):
        monkeypatch.setattr(Budget, name, getattr(Budget, name))  # what the script replaces is put back
    small = ["trainer.epochs=2", "dataset.train_size=4", "rollout.max_new_tokens=16", "rollout.group_size=4"]
    found = here("twins", "TwinsConfig", tmp_path / "out.json", "arms=[beta 0.02]", *small)
    (line,) = found["arms"]
    assert [epoch["twin_hit_rate"] for epoch in line["with"]] == [1.0, 1.0]
    assert line["with"][0]["passes_per_row"] < line["without"][0]["passes_per_row"]
    assert len({*found["weights"].values()}) == 1


def test_evaluations(tmp_path):
    small = ["trainer.max_steps=2", "trainer.eval_every=2", "trainer.eval_prompts=8", "dataset.train_size=4"]
    found = here("evaluations", "EvaluationsConfig", tmp_path / "out.json", "rollout.max_new_tokens=64", *small)
    evaluations = found["evaluations"]
    assert {name: [record["step"] for record in records] for name, records in evaluations.items()} == {
        name: [0, 2] for name in ("last texts", "no last texts", "plain")
    }
    last, none, plain = (records[-1]["eval/passes_per_row"] for records in evaluations.values())
    assert last < none <= plain
