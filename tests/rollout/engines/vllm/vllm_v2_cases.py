"""Rollouts on Model Runner V2. Run by test_vllm_v2.py under the plugin vllm_shim; about 50 tokens a second."""

import random

import pytest
import torch
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.gpu.sample import gumbel

from rollout.build import build_engine
from rollout.engines.base import Sampling
from rollout.engines.local.engine import TransformersEngine
from rollout.types import Request, RolloutError
from tests.engines import local
from tests.rollout.engines.vllm.test_vllm import moved, policy, probe_of, spec_of
from tests.rollout.golden import (
    EOS_IDS,
    Script,
    all_wrong,
    corrupt,
    differing,
    drafts_of_every_quality,
    requests_of,
)

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(**settings): a V2 engine and its model."""
    model, path, engines = policy("qwen3"), tmp_path_factory.mktemp("policy"), []
    model.save_pretrained(path)

    def get(**settings):
        spec = spec_of(path, **{"temperature": TEMPERATURE, **settings})
        spec.rollout.vllm.runner = "v2"
        engines.append(build_engine(spec))
        return engines[-1], model

    yield get
    for engine in reversed(engines):
        engine.close()


@pytest.fixture(scope="module")
def engine(start):
    return start()[0]


@pytest.fixture(scope="module")
def plain(engine):
    """Cases and their plain responses; some prompts are shared."""
    rng = random.Random(0)
    pool = [[rng.randrange(2, 60) for _ in range(n)] for n in (1, 5, 40)]
    cases = [(pool[i % 3], rng.choice([1, 2, 14, 14])) for i in range(13)]
    done, stats = engine.generate(requests_of(cases))
    assert stats.drafted == 0
    assert {c.finish for c in done} == {"stop", "length"}
    assert stats.forward_tokens >= sum(len(c.tokens) for c in done)
    return cases, done


def test_log_probs_are_the_models_own(plain):
    model = policy("qwen3")
    for (prompt, _), c in zip(*plain, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *c.tokens]])).logits[0, len(prompt) - 1 : -1]
        want = (logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(c.tokens)[:, None])[:, 0]
        assert c.logprobs == pytest.approx(want.tolist(), abs=1e-4)
        assert c.passes == len(c.tokens)


@pytest.mark.parametrize("window", [0, 3, 40])
def test_drafts_of_any_quality_change_nothing(engine, plain, window):
    cases, want = plain
    engine.reset_cache()
    before, engine.drafting.budget.window = engine.drafting.budget.window, window
    done, stats = engine.generate(requests_of(cases, drafts_of_every_quality([c.tokens for c in want])))
    engine.drafting.budget.window = before
    assert differing(done, want, 1e-5) == []
    assert sum(sum(c.reused) for c in done) == stats.accepted
    assert window == 0 or 0 < stats.accepted < stats.drafted


def test_all_accepted_all_rejected_and_several_rounds(engine, plain):
    cases, want = plain
    texts = [c.tokens for c in want]
    engine.drafting.budget.window = 40
    for drafters in ([Script(t) for t in texts], [Script(all_wrong(t)) for t in texts]):
        done, stats = engine.generate(requests_of(cases, drafters))
        assert differing(done, want, 1e-5) == []
    assert stats.accepted == 0 < stats.drafted
    rounds = [Script(corrupt(t, random.Random(i), 0.2)) for i, t in enumerate(texts)]
    done, stats = engine.generate(requests_of(cases, rounds))
    assert differing(done, want, 1e-5) == []
    assert max(r.calls for r in rounds) > 2, "a drafter is asked again after a mismatch"
    assert stats.accepted > 0


def test_equal_rows_that_find_their_draft_in_the_cache(engine, plain, monkeypatch):
    """A scored position that comes from the prefix cache is not computed: vLLM returns nothing, and is asked again."""
    prompt = list(range(2, 60))
    texts, _ = engine.generate([Request(prompt, key, 16) for key in range(6)])
    key, want = max(enumerate(texts), key=lambda pair: len(pair[1].tokens))
    assert len(want.tokens) > 8, "the draft fills the block that the prompt began"
    add, retried = LLMEngine.add_request, []

    def watched(self, name, prompt, params, **more):
        retried.append(params.skip_reading_prefix_cache)
        return add(self, name, prompt, params, **more)

    monkeypatch.setattr(LLMEngine, "add_request", watched)
    monkeypatch.setattr(engine.drafting.budget, "window", 40)
    for _ in range(2):
        done, _ = engine.generate([Request(prompt, key, 16, Script(want.tokens)) for _ in range(3)])
        assert differing(done, [want] * 3, 1e-5) == []
    assert True in retried


def test_noise_off_by_one_position_is_found(engine, plain, monkeypatch):
    """Control: verification with the noise of the next position accepts other tokens."""
    cases, want = plain
    sample = gumbel.gumbel_sample  # vLLM's sampler has its own name for it
    late = lambda logits, slots, law, seeds, at, **how: sample(logits, slots, law, seeds, at + 1, **how)  # noqa: E731
    monkeypatch.setattr(gumbel, "gumbel_sample", late)
    done, _ = engine.generate(requests_of(cases, [Script(c.tokens) for c in want]))
    assert len(differing(done, want)) > 3


def test_after_an_update_it_is_the_new_policy(start, plain):
    engine, model = start()
    cases, old = plain
    new = moved(model, 1)
    engine.update_weights(new.state_dict().items(), 4, probe_of(new))
    fresh, _ = engine.generate(requests_of(cases))
    assert {c.version for c in fresh} == {4}
    done, stats = engine.generate(requests_of(cases, [Script(c.tokens) for c in old]))
    assert differing(done, fresh, 1e-5) == []
    assert 0 < stats.accepted < stats.drafted
    assert differing(fresh, old), "control: the update changed the policy"
    with pytest.raises(RolloutError, match="does not run the weights it was sent"):
        engine.update_weights(model.state_dict().items(), 5, probe_of(new))
    weights = {**model.state_dict(), "model.norm.weight": torch.full((64,), float("nan"))}
    engine.update_weights(weights.items(), 6)
    for drafters in (None, [Script(c.tokens) for c in old]):
        with pytest.raises(RolloutError, match=r"NaN.*weight version 6"):
            engine.generate(requests_of(cases, drafters))
    engine.update_weights(model.state_dict().items(), 7, probe_of(model))
    assert differing(engine.generate(requests_of(cases))[0], old, 1e-5) == []


def test_lenient_accepts_what_the_transformers_engine_accepts(start):
    engine, model = start(law="lenient", temperature=1.0)
    cases = [([3 + i, 9, 11], 12) for i in range(8)]
    texts, _ = TransformersEngine(model, Sampling(EOS_IDS)).generate(requests_of(cases))
    new = moved(model, 1)
    engine.update_weights(new.state_dict().items(), 1, probe_of(new))
    requests = requests_of(cases, [Script(c.tokens) for c in texts], visit=1)
    for request, c in zip(requests, texts, strict=True):
        request.draft_logprobs, request.draft_version = c.logprobs, 0
    want, _ = local(new, Sampling(EOS_IDS), lenience=1.0).generate(requests)
    done, stats = engine.generate(requests)
    for c, w in zip(done, want, strict=True):
        n = sum(w.reused)
        assert (sum(c.reused), c.tokens[:n], c.behaviour_logprobs[:n]) == (n, w.tokens[:n], w.behaviour_logprobs[:n])
        assert c.logprobs[:n] == pytest.approx(w.logprobs[:n], abs=1e-4)
    assert 0 < stats.accepted < stats.drafted


def test_a_key_that_vllm_takes_for_no_seed(engine):
    requests = [Request([5, 6], -1, 10), Request([5, 6], -1, 10)]
    first, second = engine.generate(requests)[0]
    assert first.tokens == second.tokens


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"top_p": 0.9}, r"rollout\.top_p=0\.9 with"),
        ({"top_k": 5}, r"rollout\.top_k=5"),
        ({"temperature": 0.001}, r"not 0\.001"),
    ],
)
def test_laws_that_v2_cannot_verify_are_refused(start, settings, word):
    with pytest.raises(RolloutError, match=word):
        start(**settings)
