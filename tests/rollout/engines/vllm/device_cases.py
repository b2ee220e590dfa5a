"""Drafts on the device, and vLLM's own speculators behind the keyed sampler. Run by test_vllm_v2.py under vllm_shim."""

import random

import pytest
from vllm.platforms.cpu import CpuPlatform

from rollout.engines.vllm import sampler, worker
from tests.rollout.engines.vllm import test_vllm
from tests.rollout.engines.vllm.test_vllm import LAWS, close, exactly, golden, moved, probe_of, saved  # noqa: F401
from tests.rollout.engines.vllm.test_vllm_served import keep_async
from tests.rollout.golden import Script, all_wrong, corrupt, differing, requests_of


@pytest.fixture(scope="session")
def engine_of(saved):  # noqa: F811
    """engine_of(**settings): an engine whose drafts stay on the device; `speculator` may name vLLM's own."""
    engines = {}

    def get(speculator="texts", parallel=1, **settings):
        name = repr((speculator, settings, parallel))
        if name not in engines:
            spec = test_vllm.spec_of(saved("qwen3")[1], **settings)
            spec.rollout.vllm.tensor_parallel = parallel
            spec.rollout.vllm.scheduling, spec.rollout.vllm.speculator = "async", speculator
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_async))
                engines[name] = test_vllm.build_engine(spec)
        return engines[name]

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


@pytest.mark.parametrize("law", [(1.0, 0, 1.0), *LAWS])
def test_texts_of_any_quality_change_nothing(engine_of, golden, law):  # noqa: F811
    cases, want = golden(law=law)
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


@pytest.mark.parametrize("window", [1, 8, 40])
def test_long_and_short_drafts(engine_of, golden, window):  # noqa: F811
    cases, want = golden()
    engine = engine_of(draft_tokens=window)
    done, stats = engine.generate(requests_of(cases, texts_of_every_quality([t for t, _, _ in want])))
    assert differing(done, want, 1e-4) == []
    assert stats.accepted > 0


@pytest.mark.parametrize("speculator", ["ngram_gpu", "draft_model"])
def test_vllms_own_speculators_draw_as_plain_decoding_does(engine_of, golden, tmp_path_factory, speculator):  # noqa: F811
    cases, want = golden()
    if speculator == "draft_model":
        path = tmp_path_factory.mktemp("drifted")
        moved(test_vllm.policy("qwen3"), 3, 0.02).save_pretrained(path)
        speculator = f"draft_model={path}"
    engine = engine_of(speculator, draft_tokens=5)
    plain, stats = engine.generate([*requests_of(cases)])
    assert differing(plain, want, 1e-4) == []
    assert stats.sources.keys() == {speculator.partition("=")[0]}
    if "model" in speculator:
        assert stats.accepted > stats.drafted / 4, "it draws with the policy's noise"


def test_a_draft_model_with_noise_of_its_own_agrees_less(engine_of, golden, tmp_path_factory, monkeypatch):  # noqa: F811
    """Control: what the shared noise is for; no token depends on it."""
    cases, want = golden()
    path = tmp_path_factory.mktemp("itself")
    test_vllm.policy("qwen3").save_pretrained(path)
    found = {}
    for name in ("shared", "own"):
        if name == "own":
            monkeypatch.setattr(worker, "share_noise", lambda runner: None)
        engine = engine_of(f"draft_model={path}", draft_tokens=4, window=4 + (name == "own"))
        done, stats = engine.generate(requests_of(cases))
        assert differing(done, want, 1e-4) == []
        found[name] = stats.accepted / stats.drafted
    assert found["shared"] > 0.9 > 0.6 > found["own"]


def test_a_cache_too_small_for_the_batch_changes_nothing(engine_of, monkeypatch):
    """vLLM preempts rows, gives them other slots and computes their KV again."""
    from vllm.v1.core.sched.scheduler import Scheduler

    cases = [([3 + i, *range(4, 60)], 30) for i in range(26)]
    plain, _ = engine_of(eos_ids=frozenset()).generate(requests_of(cases))
    engine, preempted, preempt = engine_of(eos_ids=frozenset(), kv_mb=1), [], Scheduler._preempt_request
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda *a, **more: preempted.append(1) or preempt(*a, **more))
    drafters = [Script(corrupt(c.tokens, random.Random(i), 0.1)) for i, c in enumerate(plain)]
    for batch in (requests_of(cases), requests_of(cases, drafters)):
        done, _ = engine.generate(batch)
        assert exactly(done) == exactly(plain)
    assert preempted


def test_prompts_computed_in_parts_change_nothing(engine_of, golden):  # noqa: F811
    cases, want = golden()
    done, stats = engine_of(tokens_per_pass=16, rows_per_batch=8).generate(
        requests_of(cases, texts_of_every_quality([t for t, _, _ in want]))
    )
    assert differing(done, want, 1e-4) == []
    assert stats.accepted > 0


def test_after_an_update_it_is_the_new_policy(engine_of, golden):  # noqa: F811
    cases, want = golden()
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
    """A planted fault: every draft stands."""

    def _verify(self, *given):
        processed, tokens, _ = super()._verify(*given)
        firsts, drafts = given[4], given[-1]
        rows = (firsts[1:] - firsts[:-1]).int()
        for i, n in enumerate(rows.tolist()):
            tokens[i, : n - 1] = drafts[firsts[i] + 1 : firsts[i] + n].clamp(min=0)
        return processed, tokens, rows


@pytest.mark.parametrize("fault", ["noise", "acceptance"])
def test_planted_faults_are_found(engine_of, golden, monkeypatch, fault):  # noqa: F811
    cases, want = golden()
    draw, late = sampler.packed_draw, 1

    def shifted(logits, keys, at, *more):
        return draw(logits, keys, at + late, *more)

    if fault == "noise":
        monkeypatch.setattr(sampler, "packed_draw", shifted)
    else:
        monkeypatch.setattr(sampler.install, "__defaults__", (Trusting,))
    engine = engine_of(draft_tokens=6 + (fault == "noise"))
    done, _ = engine.generate(requests_of(cases, [Script(all_wrong(t)) for t, _, _ in want]))
    assert len(differing(done, want)) > 13


@pytest.mark.parametrize("steps", [0, 1, 4, 9])
def test_what_is_there_after_a_stop_is_a_beginning(engine_of, golden, steps):  # noqa: F811
    engine, (cases, want) = engine_of(), golden()
    asked = iter(range(10**6))
    texts_ahead = engine.ahead(requests_of(cases), lambda: next(asked) >= steps)
    for text, (tokens, _, finish) in zip(texts_ahead, want, strict=True):
        assert list(text.tokens) == tokens[: len(text.tokens)]
        assert text.finish in (None, finish)
    assert differing(engine.generate(requests_of(cases))[0], want, 1e-4) == [], "nothing of it is left behind"


def test_two_processes_that_hold_the_model_together(engine_of):
    """Tensor parallelism: both draw and propose the same."""
    cases = [([3 + i, 9, 11, 4 + i], 14) for i in range(6)]
    engine = engine_of(parallel=2)
    plain, _ = engine.generate(requests_of(cases))
    done, stats = engine.generate(requests_of(cases, texts_of_every_quality([c.tokens for c in plain])))
    assert exactly(done) == exactly(plain)
    assert 0 < stats.accepted < stats.drafted
    whole, _ = engine_of().generate(requests_of(cases))
    assert differing(plain, exactly(whole), 1e-4) == []
