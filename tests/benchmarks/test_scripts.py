"""Every benchmark script runs to its end, at its smallest size. What they measure is tested elsewhere."""

import json
import os
import subprocess
import sys

import pytest
import torch

from specrl.config import load as cli
from specrl.drafter import shortened
from specrl.tiny import load_tiny
from tests.runs import ROOT

pytestmark = pytest.mark.long


ELSEWHERE = {"ablation", "budget", "gpu", "picture", "soak", "tiny_policy"}
"""Run by a test in a file of their own, test_NAME.py."""
PARTS = {
    "ahead_run",
    "curves",
    "drafter_costs",
    "drafter_walks",
    "int8_copy",
    "mask_drafter",
    "process",
    "responses",
    "rival_engine",
    "scaling_law",
    "scaling_tables",
    "soak_checks",
    "soak_life",
    "vllm_baseline",
}
"""Of other scripts."""


def told(out):
    return json.loads(out.read_text())


def wrong(scripts, here, files):
    """Scripts that no test runs, and names above that no script has. Args: here: this file's names; files: of tests."""
    unrun = {name for name in scripts & ELSEWHERE if f"test_{name}" not in files}
    unrun |= {name for name in scripts - ELSEWHERE - PARTS if f"test_{name}" not in here}
    return unrun | ((ELSEWHERE | PARTS) - scripts)


def test_no_script_is_left_out():
    paths = [*(ROOT / "benchmarks").iterdir()]
    scripts = {path.stem for path in paths if path.suffix in (".py", ".sh") or (path / "__main__.py").exists()}
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert wrong(scripts, globals(), files) == set()
    assert wrong(scripts | {"new"}, globals(), files) == {"new"}
    assert wrong(scripts - {"picture"}, globals(), files) == {"picture"}, "a script that is gone"
    assert wrong(scripts, globals(), files - {"test_soak"}) == {"soak"}


def test_embedded_run(tmp_path):
    """Its runs take minutes: the commands are looked at, not run."""
    command, stub = ["bash", str(ROOT / "benchmarks" / "embedded_run.sh"), str(tmp_path)], {"PYTHON": "echo"}
    lines = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | stub).stdout
    runs = [cli.load(line.split()[2:]) for line in lines.splitlines()]
    assert [run.name for run in runs] == ["plain", "exact", "exact_replay1"]


def test_cache_lookup(capsys):
    from benchmarks.cache_lookup import main

    main(entries=200, rows=8)
    found = json.loads(capsys.readouterr().out)
    assert (found["entries"], found["rows"]) == (200 + 8, 8)


def test_suffix(capsys):
    from benchmarks.suffix import main

    main(rows=8, tokens=16)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["epoch"], line["tokens"]) for line in lines] == [("first epoch", 128), ("later epoch", 128)]


def test_noise(monkeypatch, tmp_path):
    from benchmarks import noise

    monkeypatch.setattr(noise, "VOCABULARY", 64)
    monkeypatch.setattr(noise, "HIDDEN", {"small": 8})
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    noise.main(2, str(tmp_path / "out.json"))
    (case,) = told(tmp_path / "out.json")["cases"]
    assert min(case[part] for part in ("head", "draw", "compiled draw")) > 0


def test_scaling(monkeypatch, tmp_path, capsys):
    pytest.importorskip("ray")
    from benchmarks import scaling

    for name, value in {"ROWS": 8, "CAP": 8, "WORKERS": (1, 2)}.items():
        monkeypatch.setattr(scaling, name, value)
    scaling.main(str(tmp_path / "out.json"), repeats=1, sizes="1,4")
    found = told(tmp_path / "out.json")
    assert len(found["sync"]) == 4
    assert min(found[key] for key in ("in_process_s", "two_workers_s", "sync_s", "train_s")) > 0
    assert [point["workers"] for point in found["step"]["measured"]] == [1, 2]
    terms = ("rollout_s", "rest_s", "verify_s", "sync_s", "unchanged_ratio")
    assert min(point[term] for point in found["step"]["measured"] for term in terms) > 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_stop_rules(tmp_path):
    from benchmarks.stop_rules import main

    main(texts="16", out=str(tmp_path / "out.json"))
    assert {case["drafter"] for case in told(tmp_path / "out.json")["cases"]} == {"first 2 layers"}


def test_equivalence(monkeypatch, tmp_path):
    """So small that nothing is shown, which it says."""
    from benchmarks.equivalence import __main__ as equivalence
    from benchmarks.equivalence import arms, learning

    monkeypatch.setattr(learning, "EPOCHS", 2)
    assert equivalence.main(equivalence.Options(seeds=2, out=str(tmp_path / "out.json"))) == 1
    found = told(tmp_path / "out.json")
    assert not found["valid"]
    assert {line["arm"] for line in found["lines"]} == {arm.name for arm in arms.ARMS}
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_selfspec(monkeypatch, tmp_path):
    from benchmarks.selfspec import overlap, sparse, texts
    from benchmarks.selfspec.__main__ import SelfSpecConfig, main

    monkeypatch.setitem(texts.TAUGHT, "steps", 2)
    for module, name in ((overlap, "ROWS"), (sparse, "BUDGETS")):
        monkeypatch.setattr(module, name, getattr(module, name)[:2])
    model, tokenizer = load_tiny()
    for part in (shortened(model, 2), tokenizer):
        part.save_pretrained(tmp_path / "draft")
    words = ["texts=8", f"drafter={tmp_path / 'draft'}", f"out={tmp_path / 'out.json'}"]
    assert cli.run(main, words, SelfSpecConfig) == 0
    found = told(tmp_path / "out.json")
    assert (found["layers"]["subsets"], found["layers"]["subsets of half layers"]) == (254, 4095)
    assert found["layers"]["lines"][-1]["what"] == "draft model"
    assert {line["context"] for line in found["sparse"]["lines"]} == set(sparse.CONTEXTS)
    assert all(line["free"] >= line["in turn"] >= 1 for line in found["overlap"]["lines"])
    assert all(line["tokens per pass"] > 1 for line in found["places"]["lines"])


def test_cotraining(monkeypatch, tmp_path):
    from benchmarks import cotraining

    for name, value in {"PROMPTS": 1, "GROUP": 2, "CAP": 16}.items():
        monkeypatch.setattr(cotraining, name, value)
    monkeypatch.setitem(cotraining.SHARED, "share", 1.0)
    cotraining.main(steps="2", out=str(tmp_path / "out.json"))
    cases = told(tmp_path / "out.json")["cases"]
    assert [case["variant"] for case in cases] == list(cotraining.VARIANTS)
    assert all(len(case["steps"]) == 2 for case in cases)


def test_drafters(monkeypatch, tmp_path):
    from benchmarks import drafter_costs, drafters

    for name, value in {"VOCABULARY": 512, "DEPTH": 2, "TOKENS": (1, 4, 8)}.items():
        monkeypatch.setattr(drafter_costs, name, value)
    monkeypatch.setattr(drafters, "KEPT", 64)
    words = ["steps=20", "prompts=8", "rows=8", f"out={tmp_path / 'out.json'}"]
    assert cli.run(drafters.main, words, drafters.DraftersConfig, training=False) == 0
    found = told(tmp_path / "out.json")
    assert [(cell["machine"], cell["rows"]) for cell in found["cells"]] == [
        (machine, rows) for machine in ("cpu", "gpu", "cpu 0.5B") for rows in (1, 8)
    ]
    assert found["agreement"]["int8"]["given"][0] > 0.95 > found["agreement"]["parallel"]["given"][0]


def test_routers(monkeypatch, tmp_path):
    from benchmarks import routers

    model, tokenizer = load_tiny()
    for part in (shortened(model, 2), tokenizer):
        part.save_pretrained(tmp_path / "draft")
    monkeypatch.setattr(routers, "REPEATS", 1)
    words = ["config=arbitrage_math", "dataset.test_size=4", f"rollout.drafter={tmp_path / 'draft'}", "seeds=1"]
    words += ["rollout.max_new_tokens=24", "methods=likelihood,oracle", "continuations=1", f"out={tmp_path / 'out'}"]
    assert cli.run(routers.main, words, routers.RouterBenchConfig, training=False) == 0
    found = told(tmp_path / "out")
    assert {point["method"] for point in found["points"]} == {"draft", "policy", "likelihood", "oracle"}


def test_judges(monkeypatch, tmp_path):
    from benchmarks import judges

    smaller = {"dataset.train_size": 8, "trainer.save_every": 2}
    kept = [word for word in judges.RUN if word.partition("=")[0] not in smaller]
    for name, value in {
        "RUN": [*kept, *(f"{key}={value}" for key, value in smaller.items())],
        "AN_EPOCH_EARLIER": "checkpoints/checkpoint-4",
        "TEST_PROBLEMS": {"an epoch earlier": 16, "worse": 16},
        "MINED_PROBLEMS": 8,
        "MORE_PROBLEMS": 16,
        "TUNING": {**judges.TUNING, "steps": 4},
    }.items():
        monkeypatch.setattr(judges, name, value)
    words = [f"work={tmp_path}", f"out={tmp_path / 'out.json'}"]
    assert cli.run(judges.main, words, judges.JudgesConfig) == 0
    assert told(tmp_path / "out.json")["free wording"]["mined"]["mismatches"] > 0


def test_rivals(monkeypatch, tmp_path):
    pytest.importorskip("vllm")
    from benchmarks import process, rivals
    from specrl.bench.pair import PairConfig

    monkeypatch.setitem(process.USERS, "TORCH_COMPILE_DISABLE", "1")  # a user's vLLM compiles, for half a minute

    words = ["config=grpo_math_vllm", "rows=8", "repeats=1", "rollout.max_new_tokens=8", f"out={tmp_path / 'out.json'}"]
    assert cli.run(rivals.main, words, PairConfig, training=False) == 0
    methods = {line["method"]: line for line in told(tmp_path / "out.json")["methods"]}
    assert methods["specrl exact, replay 0"]["identical"] == 8
    assert methods["vLLM"]["speedup"] == 1.0


def test_ahead(tmp_path):
    pytest.importorskip("ray")
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    small = ["repeats=1", "trainer.epochs=2", "dataset.train_size=8", "rollout.max_new_tokens=16"]
    for words in (["ahead", *small, f"out={out}"], ["timeline", f"run={out}", f"out={picture}"]):
        command = [sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:]]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
    line = told(out)["epochs"][-1]
    assert (line["epoch"], line["steps"]) == ("all", 2)
    assert line["auto"]["ahead"] > 0
    assert "ahead" not in line["off"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_timeline(tmp_path):
    """The documented picture, from the kept figures."""
    from benchmarks import timeline

    run, out = ROOT / "benchmarks" / "results" / "ahead-like-cpu.json", tmp_path / "out.png"
    assert cli.run(timeline.main, [f"run={run}", "epoch=1", f"out={out}"], timeline.TimelineConfig) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_host(tmp_path):
    from benchmarks import host

    for old in ("true", "false"):
        words = ["rows=16", "tokens=60", "repeats=1", f"old={old}", f"out={tmp_path / old}"]
        assert cli.run(host.main, words, host.HostConfig) == 0
    first, later = told(tmp_path / "false"), told(tmp_path / "true")
    assert set(first["sources"]) <= {"group", "contexts"}
    assert "prefix" in later["sources"]
    for found in (first, later):
        assert min(found["pass_ms"][part] for part in ("asking", "layout", "settling")) > 0
        assert min(found["index_ms"].values()) > 0
        assert found["emitted_tokens"] > 1


def test_vllm_host(tmp_path):
    pytest.importorskip("vllm")
    from benchmarks import vllm_host

    words = ["rows=[8,16]", "tokens=60", "repeats=1", f"out={tmp_path / 'out.json'}"]
    assert cli.run(vllm_host.main, words, vllm_host.VLLMHostConfig) == 0
    lines = told(tmp_path / "out.json")["lines"]
    assert [line["rows"] for line in lines] == [8, 16]
    for line in lines:
        spent = line["us_a_row"]
        assert 0 < spent["without_asking"] < spent["all"]
        assert min(spent.values()) > 0
        assert line["emitted_tokens"] > 1


def test_house(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.house", f"out={out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    lines = told(out)["lines"]
    assert 0 < lines["config=grpo_math"]["code"] < lines["config=grpo_math"]["lines"] < lines["all"]["lines"]
    assert max(map(len, done.stdout.splitlines())) <= 80
