"""Drafts on the device, and vLLM's speculators with the keyed sampler. Run by test_vllm_v2.py under vllm_shim."""

import json
import random
from functools import cache
from unittest import mock

import pytest
from transformers import AutoModelForCausalLM
from vllm.platforms.cpu import CpuPlatform

from specrl.drafter import shortened
from specrl.rollout.engines.vllm import sampler, worker
from specrl.rollout.types import RolloutError
from specrl.trainers.weights import PolicyWeights
from tests.rollout.engines.vllm import test_vllm
from tests.rollout.engines.vllm.test_updates import linked  # noqa: F401
from tests.rollout.engines.vllm.test_vllm import (  # noqa: F401
    LAWS,
    MANY_BLOCKS,
    close,
    exactly,
    golden,
    moved,
    probe_of,
    saved,
)
from tests.rollout.engines.vllm.test_vllm_served import keep_async
from tests.rollout.golden import Script, all_wrong, corrupt, differing, requests_of
from tests.runs import SHORT, build_policy, differences, run


@pytest.fixture(scope="session")
def engine_of(saved):  # noqa: F811
    """engine_of(**settings): an engine whose drafts stay on the device. `speculator` may name one of vLLM's."""
    engines = {}

    def get(speculator="texts", parallel=1, **settings):
        name = repr((speculator, settings, parallel))
        if name not in engines:
            spec = test_vllm.spec_of(saved("qwen3")[1], **settings)
            spec.rollout.vllm.tensor_parallel = parallel
            spec.rollout.vllm.scheduling, spec.rollout.vllm.speculator = "async", speculator
            with pytest.MonkeyPatch.context() as patch, mock.patch("gc.collect"):  # as in test_vllm.start
                patch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_async))
                engines[name] = test_vllm.build_engine(spec)
        return engines[name]

    yield get
    for engine in reversed(engines.values()):
        close(engine)


@pytest.fixture(scope="session")
def some(golden):  # noqa: F811
    """some(distribution): the first 14 rows of `golden`, with every prompt, and each kind of draft twice."""
    return lambda **law: tuple(part[:14] for part in golden(**law))


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


@pytest.mark.parametrize("law", [(1.0, 0, 1.0), LAWS[0], *LAWS[3:]])
def test_texts_of_any_quality_change_nothing(engine_of, some, law):
    cases, want = some(law=law)
    engine = engine_of(temperature=law[0], top_k=law[1], top_p=law[2])
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


@pytest.mark.parametrize("window", [1, 40])
def test_long_and_short_drafts(engine_of, some, window):
    cases, want = some()
    engine = engine_of(draft_tokens=window)
    done, stats = engine.generate(requests_of(cases, texts_of_every_quality([t for t, _, _ in want])))
    assert differing(done, want, 1e-4) == []
    assert stats.accepted > 0


def test_vllms_own_speculator_draws_as_plain_decoding_does(engine_of, some):
    cases, want = some()
    plain, stats = engine_of("ngram_gpu", draft_tokens=5).generate(requests_of(cases))
    assert differing(plain, want, 1e-4) == []
    assert stats.sources.keys() == {"ngram_gpu"}


@pytest.fixture(scope="session")
def drafters(tmp_path_factory):
    """drafters(far): the directory of a copy of the policy, perturbed by that much."""

    def get(far: float):
        path = tmp_path_factory.mktemp("drafter")
        moved(test_vllm.policy("qwen3"), 3, far).save_pretrained(path)
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
    """Control for the shared noise: acceptance drops without it, but no token changes."""
    cases, want = some()
    shared = acceptance(engine_of(drafter=drafters(0.0), draft_tokens=4), cases, want)
    drifted = acceptance(engine_of(drafter=drafters(0.1), draft_tokens=4), cases, want)
    monkeypatch.setattr(worker, "share_noise", lambda runner: None)
    own = acceptance(engine_of(drafter=drafters(0.0), draft_tokens=4, window=5), cases, want)
    assert shared > 0.9 > drifted > 0.25
    assert own < 0.6


def test_a_draft_model_follows_the_updates(engine_of, some, drafters):
    """Its weights are updated with the policy's, which changes the acceptance and never the samples."""
    cases, want = some()
    engine, model = engine_of(drafter=drafters(0.5), draft_tokens=4), test_vllm.policy("qwen3")
    far = acceptance(engine, cases, want)
    engine.update_weights(PolicyWeights(model), 1, probe_of(model))
    assert acceptance(engine, cases, want) == far, "an update without its weights leaves it as it was"
    engine.update_weights(PolicyWeights(model, drafter=model), 2, probe_of(model))
    assert far < 0.5 < 0.9 < acceptance(engine, cases, want)
    near = moved(model, 3, 0.1)
    engine.update_weights(PolicyWeights(model, drafter=near), 3, probe_of(model))
    assert 0.25 < acceptance(engine, cases, want) < 0.9
    lost = moved(model, 3, 5.0)
    engine.update_weights(PolicyWeights(model, drafter=lost), 4, probe_of(model))
    assert acceptance(engine, cases, want) < 0.25
    short = dict(PolicyWeights(model, drafter=model))
    del short["drafter.model.norm.weight"]
    with pytest.raises(RolloutError, match=r"lacks 1 of the model's weights, such as 'drafter.model.norm.weight'"):
        engine.update_weights(short.items(), 5, probe_of(model))
    engine.update_weights(PolicyWeights(model, drafter=model), 5, probe_of(model))
    assert acceptance(engine, cases, want) > 0.9, "a failed update leaves nothing behind"


@pytest.fixture
def updated(engine_of, drafters):
    """The engine that `linked` connects. Its draft model differs much from the policy."""
    engine = engine_of(drafter=drafters(0.5), draft_tokens=4, window=3)  # before the test's patches
    return lambda: (engine, test_vllm.policy("qwen3"))


def test_a_draft_model_follows_over_a_link_between_gpus(linked, some):  # noqa: F811
    """vLLM's endpoints of `nccl`, over a communicator of the test."""
    cases, want = some()
    delivery, started, engine, model, listener = linked
    assert acceptance(engine, cases, want) < 0.5
    delivery.take(PolicyWeights(model, drafter=model))
    delivery.choose(started)
    delivery.send(1, probe_of(model))
    assert acceptance(engine, cases, want) > 0.9
    assert sum(name.startswith("drafter.") for name in listener.heard) == len(listener.heard) / 2


def test_a_run_that_trains_the_draft_model_trains_the_same_policy(tmp_path, monkeypatch):
    """vLLM drafts with the trained model, whose acceptance is higher than the initial model's."""
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_async))
    model = build_policy(tmp_path / "policy", head_dim=32)
    shortened(AutoModelForCausalLM.from_pretrained(model), 1).save_pretrained(tmp_path / "drafter")
    options = SHORT | {"model": model, "rollout__engine": "vllm", "rollout__drafter": str(tmp_path / "drafter")}
    options |= {"rollout__vllm__kv_cache_mb": 64, "rollout__vllm__draft_tokens": 3, "rollout__max_new_tokens": 12}
    options |= {
        "trainer__drafter__patience": 0,
        "trainer__drafter__learning_rate": 3e-3,
        "trainer__drafter__share": 1.0,
    }
    kept = run(tmp_path, name="kept", **options)
    trained = run(tmp_path, name="trained", trainer__drafter__train="true", **options)
    assert differences(kept, trained) == []
    (before, *as_before), (first, *after) = (accepted(tmp_path / name) for name in ("kept", "trained"))
    assert first == before, "before the first update"
    assert sum(after) > sum(as_before)
    assert any(line["drafter/saved_s_est"] for line in lines(tmp_path / "trained")), "or it would end as useless"


def lines(folder) -> list[dict]:
    """The log records of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def accepted(folder) -> list[float]:
    """Acceptance of the draft model's tokens in each step of a run."""
    return [line["spec/acceptance_model"] for line in lines(folder)]


def test_a_cache_too_small_for_the_batch_changes_nothing(engine_of, monkeypatch):
    """vLLM preempts rows, assigns them other slots and recomputes their KV."""
    from vllm.v1.core.sched.scheduler import Scheduler

    cases = MANY_BLOCKS
    plain, _ = engine_of(eos_ids=frozenset()).generate(requests_of(cases))
    engine, preempted, preempt = engine_of(eos_ids=frozenset(), kv_mb=1), [], Scheduler._preempt_request
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda *a, **more: preempted.append(1) or preempt(*a, **more))
    drafters = [Script(corrupt(c.tokens, random.Random(i), 0.1)) for i, c in enumerate(plain)]
    for batch in (requests_of(cases), requests_of(cases, drafters)):
        done, _ = engine.generate(batch)
        assert exactly(done) == exactly(plain)
    assert preempted


def test_prompts_computed_in_parts_change_nothing(engine_of, some):
    cases, want = some()
    done, stats = engine_of(tokens_per_pass=16, rows_per_batch=8).generate(
        requests_of(cases, texts_of_every_quality([t for t, _, _ in want]))
    )
    assert differing(done, want, 1e-4) == []
    assert stats.accepted > 0


def test_after_an_update_it_is_the_new_policy(engine_of, some):
    cases, want = some()
    engine, model = engine_of(draft_tokens=7), test_vllm.policy("qwen3")
    new = moved(model, 1)
    engine.update_weights(new.state_dict().items(), 1, probe_of(new))
    fresh, _ = engine.generate(requests_of(cases))
    done, stats = engine.generate(requests_of(cases, [Script(t) for t, _, _ in want]))
    assert exactly(done) == exactly(fresh)
    assert 0 < stats.accepted < stats.drafted
    assert differing(fresh, want), "control: the update changed the policy"
    engine.update_weights(model.state_dict().items(), 2, probe_of(model))


class Trusting(sampler.KeyedVerifier):
    """Planted fault: every draft is accepted."""

    def accept(self, sampled, cu_num_logits, verify_draft_sampled):
        tokens, _ = super().accept(sampled, cu_num_logits, verify_draft_sampled)
        counts = (cu_num_logits[1:] - cu_num_logits[:-1]).int()
        for i, n in enumerate(counts.tolist()):
            start = cu_num_logits[i]
            tokens[i, : n - 1] = verify_draft_sampled[start + 1 : start + n].clamp(min=0)
        return tokens, counts


@pytest.mark.parametrize("fault", ["noise", "acceptance"])
def test_planted_faults_are_found(engine_of, some, monkeypatch, fault):
    cases, want = some()
    draw, late = sampler.packed_sample, 1

    def shifted(logits, keys, at, *more):
        return draw(logits, keys, at + late, *more)

    if fault == "noise":
        monkeypatch.setattr(sampler, "packed_sample", shifted)
    else:
        monkeypatch.setattr(sampler.install, "__defaults__", (Trusting,))
    engine = engine_of(draft_tokens=6 + (fault == "noise"))
    done, _ = engine.generate(requests_of(cases, [Script(all_wrong(t)) for t, _, _ in want]))
    assert len(differing(done, want)) > 7


def test_what_is_there_after_a_stop_is_a_beginning(engine_of, some):
    engine, (cases, want) = engine_of(), some()
    asked = iter(range(10**6))
    texts_ahead = engine.ahead(requests_of(cases), lambda: next(asked) >= 4)
    for text, (tokens, _, finish) in zip(texts_ahead, want, strict=True):
        assert list(text.tokens) == tokens[: len(text.tokens)]
        assert text.finish in (None, finish)
    assert differing(engine.generate(requests_of(cases))[0], want, 1e-4) == [], "nothing of it is left behind"


def test_two_processes_that_hold_the_model_together(engine_of):
    """Tensor parallelism: both sample and propose the same tokens."""
    cases = [([3 + i, 9, 11, 4 + i], 14) for i in range(6)]
    engine = engine_of(parallel=2)
    plain, _ = engine.generate(requests_of(cases))
    done, stats = engine.generate(requests_of(cases, texts_of_every_quality([c.tokens for c in plain])))
    assert exactly(done) == exactly(plain)
    assert 0 < stats.accepted < stats.drafted
    whole, _ = engine_of().generate(requests_of(cases))
    assert differing(plain, exactly(whole), 1e-4) == []
