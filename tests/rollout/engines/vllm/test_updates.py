"""Weight updates of vLLM: what fits, copies on the way, and recovery from failed updates."""

import os

import pytest
import torch

from specrl.rollout.engines.base import Meta, SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.types import RolloutError
from specrl.trainers.weights import PolicyWeights
from tests.rollout.engines.vllm.engines import (
    TEXT,
    Incomplete,
    assert_generates_as,
    moved,
    needs_vllm,
    probe_of,
    spec_of,
)
from tests.rollout.golden import EOS_IDS, Script, differing, requests_of

pytestmark = needs_vllm


def is_open(file):
    """Whether this process still holds a file descriptor."""
    try:
        return "specrl-weights" in os.readlink(f"/proc/self/fd/{file}")
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("family", "route"), [("qwen3", "process"), ("llama", "process"), ("qwen3", "memory")])
def test_after_updates_it_is_the_new_policy(updated, golden, memory_files, monkeypatch, family, route):
    from vllm import LLM

    finish, versions = LLM.finish_weight_update, []
    monkeypatch.setattr(LLM, "finish_weight_update", lambda *a, **more: versions.append(more) or finish(*a, **more))
    engine, model = updated(family)
    cases, want = golden(family)
    assert engine.updates.route == "process"
    engine.updates.route = route  # memory: as with several ranks
    first = engine.weight_version
    for version in (first + 3, first + 4):
        new = moved(model, version - first)
        weights = dict(new.state_dict())
        if version == first + 4 and family == "qwen3":
            del weights["lm_head.weight"]  # tied, so it may be omitted
        engine.update_weights(iter(weights.items()), version, probe_of(new))
        assert engine.weight_version == version
        assert versions[-1] == {"weight_version": str(version)}, "vLLM's own number"
        fresh, _ = TransformersEngine(new, SamplingParams(EOS_IDS)).generate(requests_of(cases))
        drafters = [Script(t) for t, _, _ in want]  # the old policy's texts
        for batch in (requests_of(cases, drafters), requests_of(cases)):
            done, _ = engine.generate(batch)
            assert differing(done, fresh, 1e-4) == []
            assert {v for c in done for v in (c.version, *c.versions)} == {version}
        assert len(differing(done, want)) > 3, "control: the update changed the policy"
    assert len(memory_files) == (2 if route == "memory" else 0), "files only on that route"
    assert not any(map(is_open, memory_files))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_model_loads_from_the_live_tensors(updated, memory_files, loads, family):
    engine, model = updated(family)
    loads.clear()  # a start loads the model's files
    new = moved(model, 1)
    listed = set(os.listdir("/dev/shm"))
    engine.update_weights(PolicyWeights(new), engine.weight_version, probe_of(new))
    (received,) = loads
    live = {name: p.data_ptr() for name, p in new.named_parameters()}
    assert {name: tensor.data_ptr() for name, tensor in received.items()} == live, "0 bytes were copied before the load"
    assert memory_files == []
    assert {name for name in os.listdir("/dev/shm") if name.startswith("specrl")} <= listed
    before = engine.score(TEXT)
    with torch.no_grad():
        for p in new.parameters():
            p.add_(1.0)
    assert engine.score(TEXT) == before, "the trainer changes its weights, not the engine's"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda metas: [*metas, Meta("model.extra", torch.float32, (1,))], "model.extra"),
        (lambda metas: metas[:-1], r"lacks 1 .*model\.norm\.weight"),
        (lambda metas: [*metas, metas[0]], "twice"),
        (lambda metas: [*metas[:-1], Meta(metas[-1].name, torch.float32, (3,))], r"\(3,\).*\(64,\)"),
    ],
    ids=["unknown", "missing", "twice", "shape"],
)
def test_weights_that_do_not_fit_are_named(saved, change, reason):
    from specrl.rollout.engines.vllm.weights import described
    from specrl.rollout.engines.weights import WeightCheck

    model, path = saved("qwen3")
    check, metas = WeightCheck(*described(spec_of(path))), PolicyWeights(model).metadata()
    check.check(metas)
    with pytest.raises(RolloutError, match=reason):
        check.check(change(metas))


@pytest.mark.parametrize(
    ("fault", "route"),
    [("declared", "process"), ("missing", "memory"), ("interrupted early", "process"), ("interrupted late", "memory")],
)
def test_after_a_failed_update_only_a_complete_one_helps(updated, golden, memory_files, loads, fault, route):
    """vLLM counts the weights that a layer has received, and would treat the remaining ones as a complete update."""
    engine, model = updated()
    engine.updates.route = route
    loads.clear()
    before, version, new = engine.score(TEXT), engine.weight_version, moved(model, 1)

    def interrupted(reached):
        yield from list(PolicyWeights(new))[:reached]
        raise OSError("the trainer is gone")

    weights, reason = {
        "declared": (Incomplete(new), "lacks 1"),
        "missing": (list(PolicyWeights(new))[:-1], "lacks 1"),
        "interrupted early": (interrupted(3), "the trainer is gone"),
        "interrupted late": (interrupted(12), "the trainer is gone"),
    }[fault]
    with pytest.raises(RolloutError, match=reason):
        engine.update_weights(weights, version + 1)
    assert not any(map(is_open, memory_files))
    assert engine.weight_version == version
    with pytest.raises(RolloutError, match=rf"version {version + 1} failed; send the weights again"):
        engine.generate(requests_of(golden()[0]))
    if fault == "declared":
        assert loads == []
        assert engine.score(TEXT) == before, "nothing was loaded"
    engine.update_weights(PolicyWeights(new), version + 2, probe_of(new))
    assert_generates_as(engine, new, golden()[0])


def test_a_version_never_goes_backwards(updated):
    engine, model = updated()
    version = engine.weight_version + 5
    engine.update_weights(model.state_dict().items(), version)
    with pytest.raises(RolloutError, match=f"version {version - 1} is older than the engine's {version}"):
        engine.update_weights(model.state_dict().items(), version - 1)
    with pytest.raises(RolloutError, match="bring"):
        engine.update_weights(None, version)


def test_the_probe_finds_wrong_weights(updated):
    engine, model = updated()
    version = engine.weight_version + 1
    with pytest.raises(RolloutError, match="does not run the weights it was sent"):
        engine.update_weights(moved(model, 2).state_dict().items(), version, probe_of(moved(model, 3)))
    with pytest.raises(RolloutError, match=f"version {version} failed"):
        engine.generate([])


def test_the_probe_finds_a_stale_output_layer(updated, monkeypatch):
    """Control: without the repair the CPU build uses the old packed copy of a tied output layer."""
    import specrl.rollout.engines.vllm.worker as worker

    engine, model = updated()
    new, version = moved(model, 1), engine.weight_version
    with monkeypatch.context() as patch:
        patch.setattr(worker, "refresh_tied_head", lambda model: None)
        with pytest.raises(RolloutError, match="does not run the weights it was sent"):
            engine.update_weights(new.state_dict().items(), version, probe_of(new))
    engine.update_weights(new.state_dict().items(), version, probe_of(new))


def test_kv_of_older_weights_is_found(updated, monkeypatch):
    """Control: without the reset, the old prompt's KV is reused and the tokens differ."""
    engine, model = updated()
    new = moved(model, 1, scale=0.3)
    cases = [([2 + i % 50 for i in range(90)], 30)] * 8
    engine.generate(requests_of(cases))
    want, _ = TransformersEngine(new, SamplingParams(EOS_IDS)).generate(requests_of(cases))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "reset_cache", lambda: None)
        engine.update_weights(new.state_dict().items(), engine.weight_version)
    done, _ = engine.generate(requests_of(cases))
    assert differing(done, want, 1e-4)
    engine.update_weights(new.state_dict().items(), engine.weight_version)
    done, _ = engine.generate(requests_of(cases))
    assert differing(done, want, 1e-4) == []


def test_a_reset_that_vllm_refuses_is_an_error(updated, monkeypatch):
    from vllm import LLM

    engine, model = updated()
    monkeypatch.setattr(LLM, "reset_prefix_cache", lambda llm: False)
    with pytest.raises(RolloutError, match="kept KV of older weights"):
        engine.update_weights(model.state_dict().items(), engine.weight_version)
