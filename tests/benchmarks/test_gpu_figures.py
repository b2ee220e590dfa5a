"""What the command for a GPU measures with, on models and figures that are known."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu import env, numerics, training
from benchmarks.gpu.compare import differences
from benchmarks.gpu.model import SAMPLING, build, plain, policies
from benchmarks.gpu.passes import fit
from benchmarks.gpu.run import Absent, Report
from benchmarks.gpu.sizes import SMALL, Sizes
from benchmarks.gpu.timing import Context
from benchmarks.gpu.watch import Pass, Watched, profiled
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.types import Completion
from tests.runs import ROOT

CPU = torch.device("cpu")


def test_the_fit_finds_the_terms_of_a_pass_and_none_is_negative():
    sizes = [(r, r * t, w) for r in (1, 16, 64) for t in (1, 5) for w in (256, 1024)]
    seen = [Pass(r, n, w, (8 + 0.02 * r + (0.03 + 1e-5 * w) * n) / 1e3) for r, n, w in sizes]
    found = fit(seen)
    terms = [found[name] for name in ("a_ms", "row_ms", "token_ms", "token_place_ms")]
    assert terms == pytest.approx([8, 0.02, 0.03, 1e-5])
    assert found["error_most"] < 1e-6
    wider_is_faster = [Pass(r, n, w, s * (1 - w / 4096)) for r, n, w, s in seen]
    found = fit(wider_is_faster)
    assert min(found[name] for name in ("a_ms", "row_ms", "token_ms", "token_place_ms")) >= 0
    assert found["error_most"] > 0.02
    with pytest.raises(Absent):
        fit(seen[:3])


def test_the_flash_kernel_takes_what_it_is_given():
    """By its signature and the shapes alone: on tensors of a GPU that is not there."""
    with FakeTensorMode():
        layer = env.Layer(Context(torch.device("cuda"), Sizes(), Report(ROOT, {})), 9, 1024, capacity=1064)
        query, key, _ = layer.packed()
        assert (query.shape, key.shape) == ((64 * 9, 16, 128), (64 * 1064, 8, 128))
        assert env.varlen(layer)(1000).shape == query.shape


def completion(*tokens):
    n = len(tokens)
    return Completion(list(tokens), [0.0] * n, [0.0] * n, [False] * n, "length", 0, 1)


def test_differences_count_tokens_behind_equal_ones_only():
    one = [completion(1, 2, 3, 4), completion(5, 6, 7, 8)]
    other = [completion(1, 2, 3, 4), completion(5, 9, 9, 9)]
    found = differences(one, other)
    assert (found["rows"], found["differing_rows"], found["first_difference"]) == (2, 1, {"median": 1, "least": 1})
    assert found["flips_per_1000_tokens"] == pytest.approx(1000 / 6)
    assert differences(one, one)["first_difference"] is None


@pytest.fixture(scope="module")
def policy():
    model = build(SMALL.policy, CPU, torch.float32)
    engine = TransformersEngine(model, SAMPLING, drafting=Watched())
    return model, engine, policies(model, engine, SMALL)


@pytest.fixture
def context(tmp_path):
    return Context(CPU, SMALL, Report(tmp_path / "out.json", {"phases": {}}))


def test_the_policy_is_as_certain_as_asked_and_the_older_one_comes_and_goes(policy):
    model, engine, found = policy
    assert found.accepted_unchanged == pytest.approx(0.93, abs=0.03)
    assert found.accepted == pytest.approx(0.9, abs=0.01)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    text = list(range(20))
    score = engine.score(text)
    with found.older():
        assert engine.score(text) != score
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    logits = model(input_ids=torch.tensor([text])).logits
    assert logits.abs().max() < 64, "as large as those of trained models, which bfloat16 can hold"


def test_profiled_passes_are_those_of_the_window(policy, context):
    _, engine, _ = policy
    found = profiled(context, engine, plain([[1, 2, 3]], [9], visit=1), skip=2, count=3)
    assert (found["rows"], found["tokens"], found["passes"]) == (1, 1, 3)
    assert min(found["ms"], found["profiled_ms"], found["operations"]) > 0
    with pytest.raises(RuntimeError, match="a rollout of 4 passes; 5 are to be seen"):
        profiled(context, engine, plain([[1, 2, 3]], [4], visit=1), skip=2, count=3)


@pytest.mark.slow
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
