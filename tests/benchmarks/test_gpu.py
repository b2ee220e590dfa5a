"""The command for a bare GPU machine: its phases fail alone, and all of them run without what such a machine lacks."""

import dataclasses
import json
import subprocess
import sys
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu import env, numerics, training
from benchmarks.gpu.__main__ import PHASES, main
from benchmarks.gpu.run import Report, faults
from benchmarks.gpu.sizes import SMALL, Sizes
from benchmarks.gpu.timing import Context
from tests.runs import ROOT

ABSENT = ("trl", "datasets", "antlr4", "math_verify", "latex2sympy2_extended", "vllm", "ray")
"""What a machine that is made for torch does not have."""


def run(script, *words, timeout=600):
    return subprocess.run(
        [sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


def figures(path):
    def refused(constant):
        raise ValueError(f"{constant} is no JSON")

    return json.loads(path.read_text(), parse_constant=refused)


@pytest.mark.parametrize("word", ["smal=true", "seconds=soon", "device=gpu", "phases=rollout", "out"])
def test_a_wrong_word_is_refused(word, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["out=x", word])
    assert ended.value.code == 2
    assert word.partition("=")[0] in capsys.readouterr().err


# --- phases that fail

FAKES = """
import json, os, subprocess, sys, time
from pathlib import Path
from benchmarks.gpu import run
from benchmarks.gpu.run import Absent, Phase, Report, Step

def fails():
    raise ValueError("planted")

def absent():
    raise Absent("no such kernel")

def raising(context):
    yield Step("before", lambda: 1)
    yield Step("in it/deep", fails)
    yield Step("lacks", absent)
    yield Step("dear", lambda: 2, needs=99)
    yield Step("after", lambda: context)
    raise KeyError("the phase itself")

def hangs(context):
    yield Step("first", lambda: 1)
    yield Step("for ever", lambda: subprocess.run([sys.executable, "-c", CHILD, sys.argv[2]]))

CHILD = "import sys, time; time.sleep(3); open(sys.argv[1], 'w').write('alive')"

def dies(context):
    yield Step("first", lambda: 1)
    yield Step("death", lambda: os._exit(7))

def late(context):
    yield Step("never", fails)

run.GRACE = 0.5
report = Report(Path(sys.argv[1]), {})
phases = [Phase("raising", raising, 30), Phase("hangs", hangs, 0.5), Phase("dies", dies, 9)]
run.run(phases, lambda report: "context", report, 39.5)
kept = report.content["phases"]
run.run([Phase("late", late, 9)], lambda report: "context", report, 0)
report.content["phases"] = kept | report.content["phases"]
report.save()
"""


@pytest.mark.long
def test_what_fails_costs_itself_alone(tmp_path):
    out, alive = tmp_path / "out.json", tmp_path / "alive"
    done = run(FAKES, str(out), str(alive), timeout=60)
    assert done.returncode == 0, done.stderr
    report = figures(out)
    phases = report["phases"]
    assert phases["raising"]["figures"] == {
        "before": 1,
        "in it": {"deep": {"error": "ValueError: planted"}},
        "lacks": {"skipped": "no such kernel"},
        "dear": {"skipped": "needs 99 s, 30 s were left"},
        "after": "context",
    }
    assert phases["raising"]["error"] == "KeyError: 'the phase itself'"
    assert phases["hangs"]["figures"] == {"first": 1}, "what was found before is kept"
    assert "killed 0.5 s after its deadline" in phases["hangs"]["error"]
    assert (phases["dies"]["figures"], phases["dies"]["error"]) == ({"first": 1}, "its process died with exit code 7")
    assert phases["raising"]["deadline_s"] == 30
    assert phases["late"]["stopped"] == "not begun: all 0 s were spent"
    assert len(faults(report)) == 5
    assert "raising: in it: deep: ValueError: planted" in faults(report)
    time.sleep(3.5)
    assert not alive.exists(), "the killed phase's own children go with it"


# --- whole

BARE = f"""
import sys
ABSENT = {ABSENT!r}

class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in ABSENT else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import torch
asked = []
there = torch.cuda.is_available
torch.cuda.is_available = lambda: asked.append(1) or there()
from benchmarks.gpu.__main__ import main
code = main(sys.argv[1:])
assert not asked, "the parent asked for a GPU, which its forked phases then cannot use"
assert not {{name.split(".")[0] for name in sys.modules}} & set(ABSENT)
raise SystemExit(code)
"""


@pytest.mark.long
def test_every_phase_runs_on_a_bare_machine(tmp_path):
    out = tmp_path / "out.json"
    done = run(BARE, "small=true", f"out={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    report = figures(out)
    phases = report["phases"]
    assert list(phases) == [phase.name for phase in PHASES]
    assert report["command"].startswith("python -m benchmarks.gpu small=true")
    assert report["machine"]["device"].startswith("CPU")
    assert report["machine"]["versions"]["torch"] in torch.__version__
    assert all(phase["figures"] for phase in phases.values())
    found = {name: phase["figures"] for name, phase in phases.items()}
    assert "not installed: trl, datasets, math_verify" in found["training"]["grpo"]["skipped"]
    assert found["vllm"]["vllm"] == found["engines"]["vllm"] == {"skipped": "vllm is not installed"}
    assert found["env"]["us_per_op"]["add"] > 0
    assert found["draw"]["integers_equal"] == {"words": True, "eager": True}
    assert found["draw"]["hidden 64"]["8 rows"]["same_draws_as_cpu"] == {"draws": 8, "differ": 0}
    assert found["draw"]["hidden 64"]["8 rows"]["trimmed"]["differ"] == 0
    assert found["pass"]["fit"]["passes"] == len(SMALL.pass_rows) * len(SMALL.pass_tokens) * len(SMALL.pass_widths)
    for line in (found["rollouts"]["8 rows x 32"][mode] for mode in ("off", "replay 0", "replay 1")):
        assert line["seconds_a_token"] > 0
        assert line["generate_seconds_a_token"] == found["generate"]["generate"]["8 rows"]["seconds_a_token"]
    assert found["rollouts"]["8 rows x 32"]["replay 1"]["reused"] > 0, "asking takes long beside passes of this size"
    assert found["numerics"]["fp32"]["against_off"]["differing_rows"] == 0
    assert found["numerics"]["bf16"]["probes"]["probes"] == SMALL.probes


@pytest.mark.long
def test_training_ends_with_the_same_weights_and_the_production_engine_is_measured(tmp_path):
    pytest.importorskip("vllm")
    out = tmp_path / "out.json"
    words = ["small=true", "phases=training,engines", "device=cpu", f"out={out}"]
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    phases = {name: phase["figures"] for name, phase in figures(out)["phases"].items()}
    trained, found = phases["training"]["grpo"], phases["engines"]
    assert trained["same"]
    assert len(trained["exact"]) == 64
    assert max(trained["reused_ratio"]) > 0
    plain, texts = found["host drafts"]["plain"], found["host drafts"]["texts"]
    assert plain["tokens"] == texts["tokens"]
    assert plain["reused"] == 0 < texts["reused"], "how much, time decides"
    assert texts["counts"]["operations_a_pass"] > 0
    assert len(found["weights"]["memory"]["seconds"]) == 3
    for line in (found["stock vllm"]["head"], found["device drafts"]["texts"], found["head"]["head"], found["sleep"]):
        assert "only on CUDA" in line["skipped"]


# --- what it measures with, on models and figures that are known


def test_the_flash_kernel_takes_what_it_is_given():
    """By its signature and the shapes alone: on tensors of a GPU that is not there."""
    with FakeTensorMode():
        layer = env.Layer(Context(torch.device("cuda"), Sizes(), Report(ROOT, {})), 9, 1024, capacity=1064)
        query, key, _ = layer.packed()
        assert (query.shape, key.shape) == ((64 * 9, 16, 128), (64 * 1064, 8, 128))
        assert env.varlen(layer)(1000).shape == query.shape


@pytest.fixture
def context(tmp_path):
    return Context(torch.device("cpu"), SMALL, Report(tmp_path / "out.json", {"phases": {}}))


@pytest.mark.long
def test_a_row_that_differs_in_float32_is_a_fault(context, monkeypatch):
    bench = numerics.Numerics(context, dataclasses.replace(SMALL.smaller), torch.float32)
    bench.prepare()
    found = bench.against_off()
    assert (found["differing_rows"], "error" in found) == (0, False)
    drafts = numerics.models.drafted

    def other_noise(asked, old):
        return [dataclasses.replace(request, key=request.key + 1) for request in drafts(asked, old)]

    monkeypatch.setattr(numerics.models, "drafted", other_noise)
    assert "rows differ in float32: none may" in bench.against_off()["error"]


def test_equal_weights_count_only_where_text_was_reused():
    reused, new = '{"spec/reused_ratio": 0.5}', '{"loss": 1.0, "spec/reused_ratio": 0.0}'
    assert "error" not in training.verdict({"exact": "a", "off": "a"}, [new, reused])
    assert "differ" in training.verdict({"exact": "a", "off": "b"}, [reused])["error"]
    assert "no draft was accepted" in training.verdict({"exact": "a", "off": "a"}, [new])["error"]
