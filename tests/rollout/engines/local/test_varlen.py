"""Passes for GPUs, with a reference implementation of their attention on a CPU."""

import collections

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import specrl.rollout.engines.local.engine as engine_module
from specrl.rollout.engines.local import probe, varlen
from specrl.rollout.engines.local.probe import packed_model
from specrl.rollout.engines.local.reader import Reader
from specrl.rollout.types import RolloutError
from tests.rollout.golden import (
    SAMPLING,
    differing,
    drafts_of_every_quality,
    engine_of,
    requests_of,
)

WAITS = {"aten._local_scalar_dense", "aten.item", "aten.nonzero", "aten.is_nonzero"}


@pytest.fixture
def on_gpu_passes(monkeypatch):
    monkeypatch.setattr(probe, "on_gpu", lambda model: True)


class Counted(TorchDispatchMode):
    """Counts how often each op runs, except views."""

    def __init__(self):
        super().__init__()
        self.ops = collections.Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if not op.is_view:
            self.ops[str(op).rpartition(".")[0]] += 1
        return op(*args, **(kwargs or {}))


def test_flash_attention_takes_what_it_is_given():
    """The call on CUDA as far as shapes and types go. One query head too many is rejected."""
    with FakeTensorMode():
        half = {"dtype": torch.bfloat16, "device": "cuda"}
        whole = lambda n: torch.zeros(n, dtype=torch.int32, device="cuda")  # noqa: E731
        new, slabs = torch.empty(12, 2, 64, **half), torch.empty(4 * 50 + 1, 2, 64, **half)
        rest = (slabs, slabs, torch.zeros(12, dtype=torch.int64, device="cuda"), whole(5), whole(5), whole(4))
        for window in (0, 16):
            out = varlen.flash(torch.empty(12, 8, 64, **half), new, new, *rest, varlen.QUERIES, 50, window, 0.125)
            assert (out.shape, out.dtype, out.device.type) == ((12, 8, 64), torch.bfloat16, "cuda")
        assert varlen.unsplit(out.device) == {"num_splits": 1}


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mistral"])
def test_tokens_are_those_of_a_loop_without_a_cache(golden, on_gpu_passes, family):
    model, cases, want = golden(family)
    engine = engine_of(model, window=6)
    assert engine.policy.layout is varlen.StaticPass
    for drafters in (None, drafts_of_every_quality([t for t, _, _ in want])):
        assert differing(engine.generate(requests_of(cases, drafters))[0], want) == []


def test_a_pass_that_writes_a_place_too_late_is_seen(golden, on_gpu_passes, monkeypatch):
    model, cases, want = golden("llama")
    fill = varlen.StaticPass.fill

    def late(layout, tokens, *of_draws):
        fill(layout, np.roll(tokens, 1) if len(of_draws) and len(tokens) > 20 else tokens, *of_draws)

    monkeypatch.setattr(varlen.StaticPass, "fill", late)
    assert differing(engine_of(model, window=6).generate(requests_of(cases))[0], want)


# Operations of a pass -------------------------------------------------------------------------------------------------


def counted_pass(model) -> Counted:
    policy = packed_model(model, SAMPLING)
    nothing = [np.zeros(9, np.int64)] * 3
    with policy.inference():
        kv = policy.kv(3, 20)
        policy.launch([1] * 9, policy.layout(kv, [0, 1, 2], [0, 0, 0], [3, 2, 4], "cpu"), nothing).wait()
        with Counted() as counted:
            policy.launch([1] * 9, policy.layout(kv, [0, 1, 2], [3, 2, 4], [3, 2, 4], "cpu"), nothing).wait()
    return counted.ops


def test_a_layer_takes_at_most_40_ops_and_a_pass_waits_for_nothing(build_model, on_gpu_passes, monkeypatch):
    """Counts ops except views for transformers' Qwen3, which takes 61 a layer with padded rows."""
    config = build_model("qwen3").config
    deeper = {**config.to_dict(), "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    models = [AutoModelForCausalLM.from_config(type(config)(**kind)) for kind in (config.to_dict(), deeper)]
    shallow, deep = map(counted_pass, models)
    layer = deep - shallow
    print(f"{layer.total()} ops a layer, {deep.total() - 3 * layer.total()} others")
    assert layer.total() <= 40
    assert layer["specrl.attend"] == 1
    assert not WAITS & deep.keys()
    for op in deep:
        assert not any(word in op for word in ("mask", "sort", "nonzero", "topk", "repeat", "pad")), op
    assert deep["aten.copy_"] == 2, "one copy to the device, one back"
    monkeypatch.setattr(probe, "on_gpu", lambda model: False)
    assert any("mask" in op for op in counted_pass(build_model("qwen3"))), "control: padded rows have a mask"
    with Counted() as counted:
        torch.ones(1).item()
    assert WAITS & counted.ops.keys(), "control: a wait is seen"


def test_a_rollout_has_no_more_shapes_than_there_are_buckets(golden, on_gpu_passes):
    model, cases, want = golden("llama")
    engine, sizes = engine_of(model), []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, ids: sizes.append(ids[0].shape[1]))
    for visit in range(4):
        drafters = drafts_of_every_quality([t for t, _, _ in want], seed=visit)
        engine.generate(requests_of(cases, drafters, visit))
    hook.remove()
    assert {*sizes} <= {*varlen.BUCKETS}
    assert len({*sizes}) <= 10 < len(sizes)


# Captured passes ------------------------------------------------------------------------------------------------------


def replayed(step):
    """Replaces a CUDA graph: reads its buffers again and writes its results to the same memory."""
    results, runs = step(), []

    def replay():
        for old, new in zip(results, step(), strict=True):
            old.copy_(new)
        runs.append(1)

    return replay, results


def test_replayed_passes_give_the_same_tokens(golden, on_gpu_passes):
    model, cases, want = golden("qwen3")
    engine, recorded = engine_of(model, window=6), []
    engine.policy.record = lambda step: recorded.append(step) or replayed(step)
    drafters = drafts_of_every_quality([t for t, _, _ in want])
    for batch in (requests_of(cases), requests_of(cases, drafters)):
        recorded.clear()
        assert differing(engine.generate(batch)[0], want) == []
        assert 2 < len(recorded) < 20, "shapes that came again, each once"


def test_a_replay_that_reads_what_it_was_captured_with_is_seen(golden, on_gpu_passes):
    model, cases, want = golden("qwen3")
    engine = engine_of(model, window=6)

    def stale(step):
        results = step()
        return (lambda: None), results

    engine.policy.record = stale
    with pytest.raises((AssertionError, RolloutError)):  # other tokens, or NaN where nothing was computed
        assert differing(engine.generate(requests_of(cases))[0], want) == []


def test_a_model_that_cannot_be_captured_says_so_and_goes_on(golden, on_gpu_passes, caplog):
    model, cases, want = golden("qwen3")
    engine = engine_of(model, window=6)

    def refuses(step):
        raise RuntimeError("operation not permitted when stream is capturing")

    engine.policy.record = refuses
    assert differing(engine.generate(requests_of(cases))[0], want) == []
    assert caplog.text.count("cannot be captured as CUDA graphs (operation not permitted") == 1


# The host while the device computes ----------------------------------------------------------------------------------


def test_one_cohort_drafts_while_the_others_pass_runs(golden, on_gpu_passes, monkeypatch):
    model, cases, want = golden("qwen3")
    monkeypatch.setattr(engine_module, "OVERLAP", 8)
    engine, seen = engine_of(model, window=6), []
    propose, launch, collect = engine.drafting.propose, Reader.launch, Reader.collect
    engine.drafting.propose = lambda rows, stats: seen.append("draft") or propose(rows, stats)
    monkeypatch.setattr(Reader, "launch", lambda reader, *of: seen.append("launch") or launch(reader, *of))
    monkeypatch.setattr(Reader, "collect", lambda reader, flight: seen.append("wait") or collect(reader, flight))
    for drafters in (None, drafts_of_every_quality([t for t, _, _ in want])):
        seen.clear()
        assert differing(engine.generate(requests_of(cases, drafters))[0], want) == []
        beside = sum(seen[i : i + 4] == ["wait", "draft", "launch", "wait"] for i in range(len(seen)))
        assert seen[:4] == ["draft", "launch", "draft", "launch"], "two passes are under way"
        assert beside >= 3, "and one is settled, drafted for and launched again while the other runs"
        assert seen.count("launch") == seen.count("wait")


def test_cohorts_and_rows_that_wait(golden, on_gpu_passes, monkeypatch):
    model, cases, want = golden("llama")
    monkeypatch.setattr(engine_module, "OVERLAP", 6)
    drafters = drafts_of_every_quality([t for t, _, _ in want])
    engine = engine_of(model, window=6, rows_per_batch=9, tokens_per_pass=20)
    done, stats = engine.generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    assert stats.accepted == sum(sum(c.reused) for c in done)


# Fused operations, and cuDNN ------------------------------------------------------------------------------------------


def test_attention_stays_off_cudnn_within_a_rollout(build_model):
    policy = packed_model(build_model("qwen3"), SAMPLING)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with policy.inference():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_norms_are_put_back(build_model, on_gpu_passes):
    model = build_model("qwen3")
    ids = torch.tensor([[5, 9, 30]])
    before = model(input_ids=ids).logits
    policy = packed_model(model, SAMPLING)
    with policy.inference():
        assert any("forward" in vars(module) for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(input_ids=ids).logits, before)
