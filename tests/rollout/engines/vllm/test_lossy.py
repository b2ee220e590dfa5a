"""acceptance=lenient, judged and routed with vLLM. The judge reads the hidden states that vLLM computes logits from."""

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

from specrl.drafter import shortened
from specrl.rollout.build import build_policy
from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.engines.base import EngineSpec, SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.lossy.judge import JudgeHead
from specrl.rollout.lossy.pair import fingerprint
from specrl.rollout.lossy.routed import RoutedRollout
from specrl.rollout.lossy.router import Router, StepEnd, by_likelihood
from specrl.rollout.sections import RoutedConfig
from specrl.rollout.types import Request, RolloutError
from specrl.run.policy import TINY_PATH
from specrl.tiny import load_tiny
from tests.engines import judged, local, routed
from tests.rollout.engines.vllm.engines import (
    close,
    exactly,
    moved,
    needs_vllm,
    policy,
    probe_of,
    spec_of,
    start,
)
from tests.rollout.golden import EOS_IDS, VOCAB, Script, corrupt, differing, prompts_and_caps, requests_of

pytestmark = needs_vllm


def lenient_requests(cases, texts, visit):
    requests = requests_of(cases, [Script(c.tokens) for c in texts], visit)
    for request, c in zip(requests, texts, strict=True):
        request.draft_logprobs, request.draft_version = c.logprobs, 0
    return requests


def test_lenient_decides_as_the_transformers_engine(saved, updated):
    lenience = 1.65
    cases = [(prompt, 30) for prompt, _ in prompts_and_caps(30)]
    texts, _ = TransformersEngine(saved("qwen3")[0], SamplingParams(EOS_IDS)).generate(requests_of(cases))
    engine, model = updated(acceptance="lenient", lenience=lenience, draft_tokens=40)
    new = moved(model, 1)
    engine.update_weights(new.state_dict().items(), 1, probe_of(new))
    reference = local(new, SamplingParams(EOS_IDS), lenience=lenience)
    reference.update_weights(None, 1)
    want, _ = reference.generate(lenient_requests(cases, texts, visit=1))
    done, stats = engine.generate(lenient_requests(cases, texts, visit=1))
    assert differing(done, want, 1e-4) == []
    for c, w in zip(done, want, strict=True):
        assert (c.reused, c.versions, c.draft_version) == (w.reused, w.versions, 0)
        assert c.behaviour_logprobs == pytest.approx(w.behaviour_logprobs, abs=1e-4)
    assert 0 < stats.accepted < stats.drafted
    assert any(len(set(c.versions)) == 2 for c in done)
    exact, _ = TransformersEngine(new, SamplingParams(EOS_IDS)).generate(requests_of(cases, visit=1))
    assert len(differing(done, exact)) > 10, "control: the rule is not the exact one"
    with pytest.raises(RolloutError, match="log-probs"):
        engine.generate(requests_of([([5], 9)], [Script([5] * 9)]))


def head(threshold):
    return JudgeHead(torch.randn(64, generator=torch.Generator().manual_seed(0)), 0.0, threshold)


@pytest.fixture(scope="module")
def judging(engine_of, tmp_path_factory):
    """judging(threshold): an engine whose judge is `head(threshold)`."""

    def get(threshold, **settings):
        folder = tmp_path_factory.getbasetemp() / f"judge-{threshold}"
        head(threshold).save(folder, {"policy": fingerprint(policy("qwen3"))})
        return engine_of(acceptance="judged", trained=str(folder), **settings)

    return get


def asked(cases, want):
    """Requests with old texts that start like the policy's, and with distinguishable stored log-probs."""
    rng, made = random.Random(5), requests_of(cases)
    for request, (tokens, _, _) in zip(made, want, strict=True):
        text = [tokens[0], *corrupt(tokens[1:], rng, 0.3)]
        request.drafter = SuffixDrafter(PromptTexts(), text)
        request.draft_logprobs = [-0.5 - i / 1024 for i in range(len(text))]
    return made


def test_it_is_the_judge_of_the_transformers_engine(judging, golden):
    (cases, want), threshold = golden(), 0.5
    reference = judged(policy("qwen3"), SamplingParams(EOS_IDS), head(threshold), window=6)
    theirs, _ = reference.generate(asked(cases, want))
    done, stats = judging(threshold).generate(asked(cases, want))
    assert differing(done, exactly(theirs), 1e-3) == []
    for ours, their in zip(done, theirs, strict=True):  # both have one more sample after a full draft
        columns = (ours.reused, their.reused, ours.behaviour_logprobs, their.behaviour_logprobs)
        both = [(mine, other) for *drafted, mine, other in zip(*columns, strict=True) if all(drafted)]
        assert all(mine == pytest.approx(other, abs=1e-3) for mine, other in both)
    assert 0 < stats.accepted <= stats.drafted
    assert stats.route_faults == 0
    assert differing(done, want, 1e-3), "a judge that accepts changes the text"
    logprobs = [logprob for c in done for logprob in c.behaviour_logprobs]
    stored = sum(logprob < -0.5 and (-0.5 - logprob) * 1024 % 1 == 0 for logprob in logprobs)
    assert stored > 2, "by chance a log-prob of the policy can look like a stored one"


def test_small_steps_and_shared_prompts_change_nothing(judging, golden):
    """Steps with waiting rows, joining rows, partially computed prompts, and half of each draft."""
    cases, want = golden()
    done, _ = judging(0.5).generate(asked(cases, want))
    bounded, _ = judging(0.5, tokens_per_pass=40, rows_per_batch=5, draft_tokens=3).generate(asked(cases, want))
    assert differing(bounded, exactly(done), 1e-4) == []


def test_hidden_states_of_other_tokens_are_found(judging, golden, monkeypatch):
    """Control of the test above: hidden states shifted by one position give a different text."""
    from specrl.rollout.verify import TargetSamples

    cases, want = golden()
    done, _ = judging(0.5).generate(asked(cases, want))
    hidden = TargetSamples.hidden.fget
    monkeypatch.setattr(TargetSamples, "hidden", property(lambda samples: hidden(samples).roll(1, 0)))
    off, _ = judging(0.5).generate(asked(cases, want))
    assert differing(off, exactly(done), 1e-4)


def test_a_judge_of_another_policy_is_refused(saved, tmp_path):
    head(0.5).save(tmp_path, {"policy": "another"})
    with pytest.raises(RolloutError, match="was trained for another policy"):
        start(spec_of(saved("qwen3")[1], acceptance="judged", trained=str(tmp_path)))


@pytest.fixture(scope="module")
def reader(saved):
    """A vLLM engine as the policy of a RoutedRollout; four draft tokens a step, fewer than most steps have."""
    with mock.patch("gc.collect"):
        engine = build_policy(spec_of(saved("qwen3")[1], draft_tokens=4))
    yield engine
    close(engine)


STEP_END = StepEnd(["ab", "b"], lambda tokens: "".join("abcdefghij"[t % 10] for t in tokens), EOS_IDS, 40, VOCAB)
ROUTERS = {
    "all": Router(lambda steps: [1.0] * len(steps), 0.5),
    "every other": Router(lambda steps: [len(c.history) % 2 for c in steps], 0.5),
    "likelihood": by_likelihood(8.0),
}


def asked_of_both():
    return requests_of([(prompt, 30) for prompt, _ in prompts_and_caps(12)])


@pytest.mark.parametrize(
    ("router", "draft"), [("all", "vllm"), ("every other", "transformers"), ("likelihood", "vllm")]
)
def test_a_routed_rollout_is_that_of_transformers_engines(saved, engine_of, reader, router, draft):
    small, sampling = saved("llama")[0], SamplingParams(EOS_IDS)
    writer = local(small, sampling) if draft == "transformers" else engine_of("llama")
    done, stats = RoutedRollout(reader, writer, ROUTERS[router], STEP_END).generate(asked_of_both())
    theirs = routed(saved("qwen3")[0], sampling, small, ROUTERS[router], STEP_END)
    want, counts = theirs.generate(asked_of_both())
    assert differing(done, exactly(want), 1e-3) == []
    assert [c.reused for c in done] == [c.reused for c in want]
    for ours, their in zip(done, want, strict=True):
        assert ours.behaviour_logprobs == pytest.approx(their.behaviour_logprobs, abs=1e-3)
    assert (stats.steps, stats.escalated, stats.drafted) == (counts.steps, counts.escalated, counts.drafted)
    plain, _ = local(saved("qwen3")[0], sampling).generate(asked_of_both())
    assert (differing(done, plain, 1e-3) == []) == (router == "all")


def test_noise_of_another_position_after_a_step_is_caught(saved, reader, monkeypatch):
    """Planted fault: vLLM samples each request with the noise of a response's beginning."""
    generate = reader.generate
    for_beginnings = lambda requests: generate([replace(r, position=0) for r in requests])  # noqa: E731
    monkeypatch.setattr(reader, "generate", for_beginnings)
    writer = local(saved("llama")[0], SamplingParams(EOS_IDS))
    done, _ = RoutedRollout(reader, writer, ROUTERS["all"], STEP_END).generate(asked_of_both())
    plain, _ = local(saved("qwen3")[0], SamplingParams(EOS_IDS)).generate(asked_of_both())
    assert differing(done, plain, 1e-3)


def test_the_options_of_a_run_route_alike_on_both_engines(tmp_path):
    """A policy and a draft model, each with an engine, from their directories."""
    model, tokenizer = load_tiny()
    shortened(model, 4).save_pretrained(tmp_path)
    routing = RoutedConfig(threshold=6.0, separators=["\\n"], max_step_tokens=40)
    config = RolloutConfig(acceptance="routed", drafter=str(tmp_path), routed=routing, max_new_tokens=40)
    config.kv_cache_mb, eos_ids = 16, frozenset({tokenizer.eos_token_id})
    prompt = tokenizer("Tom has 30 pens. He buys 12. How many pens does Tom have now?\n").input_ids
    texts = []
    for engine in ("transformers", "vllm"):
        config.engine = engine
        built = start(EngineSpec(model=str(TINY_PATH), eos_ids=eos_ids, rollout=config))
        done, stats = built.generate([Request(prompt, key, 40) for key in range(4)])
        texts.append([(c.tokens, c.reused) for c in done])
        built.close()
    assert texts[0] == texts[1]
    assert stats.steps > 4
