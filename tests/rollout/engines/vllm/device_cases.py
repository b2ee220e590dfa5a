"""Drafts on the device, and vLLM's speculators with the keyed sampler. Run by test_vllm_v2.py under vllm_shim."""

import json
import random
from functools import cache

import pytest
from transformers import AutoModelForCausalLM
from vllm.v1.core.sched.scheduler import Scheduler

from specrl.drafter import shortened
from specrl.rollout.engines.vllm import sampler, worker
from specrl.rollout.types import RolloutError
from specrl.trainers.weights import PolicyWeights
from tests.rollout.engines.vllm.engines import MANY_BLOCKS, adjusted, close, exactly, moved, probe_of, spec_of, start
from tests.rollout.engines.vllm.servers import keep_async
from tests.rollout.golden import EOS_IDS, Script, all_wrong, corrupt, differing, requests_of
from tests.runs import SHORT, build_policy, differences, run


@pytest.fixture(scope="session")
def engine_of(saved):
    """engine_of(**settings): an engine whose drafts stay on the device. `speculator` may name one of vLLM's."""
    engines = {}

    def get(speculator="device", eos_ids=EOS_IDS, distribution=(1.0, 0, 1.0), **settings):
        name = repr((speculator, settings))
        if name not in engines:
            spec = spec_of(saved("qwen3")[1], **settings)
            spec.rollout.vllm.speculator = speculator
            with pytest.MonkeyPatch.context() as patch:
                keep_async(patch)
                engines[name] = start(spec)
        return adjusted(engines[name], eos_ids=eos_ids, distribution=distribution)

    yield get
    for engine in reversed(engines.values()):
        close(engine)


def texts_of_every_quality(rows):
    rng = random.Random(3)
    makers = (
        lambda t: t,
        lambda t: corrupt(t, rng, 0.15),
        all_wrong,
        lambda t: [*t[:4], *t[5:], 7],
        lambda t: t[:3],
        lambda t: [],
        lambda t: [1] * 40,
    )
    return [Script(makers[i % len(makers)](t)) for i, t in enumerate(rows)]


def test_texts_of_any_quality_change_nothing(engine_of, some):
    distribution = (0.8, 9, 0.9)
    cases, want = some(distribution=distribution)
    engine = engine_of(distribution=distribution)
    plain, stats = engine.generate(requests_of(cases))
    assert differing(plain, want, 1e-4) == []
    assert stats.drafted == 0
    steps = stats.passes
    done, stats = engine.generate(requests_of(cases, texts_of_every_quality([t for t, _, _ in want])))
    assert exactly(done) == exactly(plain), "bit for bit, log-probs too"
    assert 0 < stats.accepted < stats.drafted
    assert sum(sum(c.reused) for c in done) <= stats.accepted
    done, stats = engine.generate(requests_of(cases, [Script(t) for t, _, _ in want]))
    assert exactly(done) == exactly(plain)
    assert stats.passes < steps / 2


def test_prompts_computed_in_parts_change_nothing(engine_of, some):
    cases, want = some()
    texts = texts_of_every_quality([t for t, _, _ in want])
    engine = engine_of(tokens_per_pass=16, rows_per_batch=4)
    done, stats = engine.generate(requests_of(cases, texts))
    assert differing(done, want, 1e-4) == []
    assert stats.accepted > 0


@pytest.fixture(scope="session")
def drafters(saved, tmp_path_factory):
    """drafters(scale): the directory of a copy of the policy, perturbed by that much."""

    def get(scale: float):
        path = tmp_path_factory.mktemp("drafter")
        moved(saved("qwen3")[0], 3, scale).save_pretrained(path)
        return str(path)

    return cache(get)


def acceptance(engine, cases, want) -> float:
    """Acceptance of the draft model's tokens. Responses are always those of plain decoding."""
    done, stats = engine.generate(requests_of(cases))
    assert differing(done, want, 1e-4) == []
    assert stats.sources.keys() == {"model"}
    assert stats.verify_s > 0
    return stats.accepted / stats.drafted


def test_a_draft_model_with_noise_of_its_own_agrees_less(engine_of, some, drafters, monkeypatch):
    """Control for the shared noise, with which the next test's copy of the policy has over 0.9: no token changes."""
    monkeypatch.setattr(worker, "share_noise", lambda runner: None)
    assert acceptance(engine_of(drafter=drafters(0.0), draft_tokens=5), *some()) < 0.6


def test_a_draft_model_follows_the_updates(saved, engine_of, some, drafters):
    """Its weights are updated with the policy's, which changes the acceptance and never the samples."""
    cases, want = some()
    engine, (model, _) = engine_of(drafter=drafters(0.5), draft_tokens=4), saved("qwen3")
    far = acceptance(engine, cases, want)
    engine.update_weights(PolicyWeights(model), 1, probe_of(model))
    assert acceptance(engine, cases, want) == far, "an update without its weights leaves it as it was"
    near = moved(model, 3, 0.1)
    engine.update_weights(PolicyWeights(model, drafter=near), 2, probe_of(model))
    assert max(far, 0.25) < acceptance(engine, cases, want) < 0.9
    short = dict(PolicyWeights(model, drafter=model))
    del short["drafter.model.norm.weight"]
    with pytest.raises(RolloutError, match=r"lacks 1 of the model's weights, such as 'drafter.model.norm.weight'"):
        engine.update_weights(short.items(), 3, probe_of(model))
    engine.update_weights(PolicyWeights(model, drafter=model), 3, probe_of(model))
    assert far < 0.5 < 0.9 < acceptance(engine, cases, want), "a copy of the policy; the failed update left nothing"


def test_a_run_that_trains_the_draft_model_trains_the_same_policy(tmp_path, monkeypatch):
    """vLLM drafts with the trained model, whose acceptance is higher than the initial model's."""
    keep_async(monkeypatch)
    model = build_policy(tmp_path / "policy", head_dim=32)
    shortened(AutoModelForCausalLM.from_pretrained(model), 1).save_pretrained(tmp_path / "drafter")
    options = SHORT | {"model": model, "rollout__engine": "vllm", "rollout__drafter": str(tmp_path / "drafter")}
    options |= {"rollout__kv_cache_mb": 64, "rollout__draft_tokens": 3, "rollout__max_new_tokens": 8}
    options |= {"trainer__drafter__learning_rate": 3e-3, "trainer__drafter__share": 1.0, "trainer__epochs": 1}
    kept = run(tmp_path, name="kept", **options)
    trained = run(tmp_path, name="trained", trainer__drafter__train="true", **options)
    assert differences(kept, trained) == []
    before, after = (lines(tmp_path / name) for name in ("kept", "trained"))
    name = "spec/acceptance_model"
    assert after[0][name] == before[0][name], "before the first update"
    assert sum(line[name] for line in after[1:]) > sum(line[name] for line in before[1:])


def lines(folder) -> list[dict]:
    """The log records of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_cache_too_small_for_the_batch_changes_nothing(engine_of, monkeypatch):
    """vLLM preempts rows, assigns them other slots and recomputes their KV."""
    plain, _ = engine_of(eos_ids=frozenset()).generate(requests_of(MANY_BLOCKS))
    engine, preempted, preempt = engine_of(eos_ids=frozenset(), kv_mb=1), [], Scheduler._preempt_request
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda *a, **more: preempted.append(1) or preempt(*a, **more))
    drafters = [Script(corrupt(c.tokens, random.Random(i), 0.1)) for i, c in enumerate(plain)]
    done, _ = engine.generate(requests_of(MANY_BLOCKS, drafters))
    assert exactly(done) == exactly(plain)
    assert preempted


def test_after_an_update_it_is_the_new_policy(saved, engine_of, some):
    cases, want = some()
    engine, (model, _) = engine_of(), saved("qwen3")
    new = moved(model, 1)
    engine.update_weights(new.state_dict().items(), 1, probe_of(new))
    fresh, _ = engine.generate(requests_of(cases))
    done, stats = engine.generate(requests_of(cases, [Script(t) for t, _, _ in want]))
    assert exactly(done) == exactly(fresh)
    assert 0 < stats.accepted < stats.drafted
    assert differing(fresh, want), "control: the update changed the policy"
    engine.update_weights(model.state_dict().items(), 2, probe_of(model))


def trusting(accept=sampler.KeyedVerifier.accept):
    """Planted fault, in place of `KeyedVerifier.accept`: every draft is accepted."""

    def accept_all(verifier, sampled, cu_num_logits, verify_draft_sampled):
        tokens, _ = accept(verifier, sampled, cu_num_logits, verify_draft_sampled)
        counts = (cu_num_logits[1:] - cu_num_logits[:-1]).int()
        for i, n in enumerate(counts.tolist()):
            first = cu_num_logits[i]
            tokens[i, : n - 1] = verify_draft_sampled[first + 1 : first + n].clamp(min=0)
        return tokens, counts

    return accept_all


@pytest.mark.parametrize("fault", ["noise", "acceptance"])
def test_planted_faults_are_found(engine_of, some, monkeypatch, fault):
    cases, want = some()
    packed_sample = sampler.packed_sample
    engine = engine_of()
    if fault == "noise":

        def sample(logits, keys, positions, *more):
            return packed_sample(logits, keys, positions + 1, *more)

        monkeypatch.setattr(sampler, "packed_sample", sample)
    else:
        monkeypatch.setattr(sampler.KeyedVerifier, "accept", trusting())
    done, _ = engine.generate(requests_of(cases, [Script(all_wrong(t)) for t, _, _ in want]))
    assert len(differing(done, want)) > 3
