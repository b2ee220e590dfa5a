"""What the command for a GPU measures with, on models and figures that are known."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu import env, numerics, training
from benchmarks.gpu.run import Report
from benchmarks.gpu.sizes import SMALL, Sizes
from benchmarks.gpu.timing import Context
from tests.runs import ROOT

CPU = torch.device("cpu")


def test_the_flash_kernel_takes_what_it_is_given():
    """By its signature and the shapes alone: on tensors of a GPU that is not there."""
    with FakeTensorMode():
        layer = env.Layer(Context(torch.device("cuda"), Sizes(), Report(ROOT, {})), 9, 1024, capacity=1064)
        query, key, _ = layer.packed()
        assert (query.shape, key.shape) == ((64 * 9, 16, 128), (64 * 1064, 8, 128))
        assert env.varlen(layer)(1000).shape == query.shape


@pytest.fixture
def context(tmp_path):
    return Context(CPU, SMALL, Report(tmp_path / "out.json", {"phases": {}}))


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
