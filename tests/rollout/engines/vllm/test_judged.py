"""acceptance=judged with vLLM: the judge reads the hidden states of vLLM's logits, on both model runners."""

import random

import pytest
import torch

from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.lossy.judge import JudgeHead
from specrl.rollout.lossy.pair import fingerprint
from specrl.rollout.sections import JudgedConfig
from specrl.rollout.types import RolloutError
from tests.engines import judged
from tests.rollout.engines.vllm.engines import exactly, needs_vllm, on_v1, policy, spec_of, start
from tests.rollout.golden import EOS_IDS, corrupt, differing, requests_of

pytestmark = needs_vllm


def head(threshold):
    return JudgeHead(torch.randn(64, generator=torch.Generator().manual_seed(0)), 0.0, threshold)


@pytest.fixture(scope="module")
def judging(engine_of, tmp_path_factory):
    """judging(threshold): an engine whose judge is `head(threshold)`."""

    def get(threshold, **settings):
        folder = tmp_path_factory.getbasetemp() / f"judge-{threshold}"
        head(threshold).save(folder, {"policy": fingerprint(policy("qwen3"))})
        return engine_of(acceptance="judged", judged=JudgedConfig(path=str(folder)), **settings)

    return get


def asked(cases, want):
    """Requests with old texts that start like the policy's, and with distinguishable stored log-probs."""
    rng, made = random.Random(5), requests_of(cases)
    for request, (tokens, _, _) in zip(made, want, strict=True):
        text = [tokens[0], *corrupt(tokens[1:], rng, 0.3)]
        request.drafter = SuffixDrafter(PromptTexts(), text)
        request.draft_logprobs = [-0.5 - i / 1024 for i in range(len(text))]
    return made


@pytest.mark.parametrize(("threshold", "window"), [(0.0, 6), (0.5, 1), pytest.param(0.5, 6, marks=on_v1), (1.1, 6)])
def test_it_is_the_judge_of_the_transformers_engine(judging, golden, threshold, window):
    cases, want = golden()
    reference = judged(policy("qwen3"), SamplingParams(EOS_IDS), head(threshold), window=6)
    theirs, _ = reference.generate(asked(cases, want))
    done, stats = judging(threshold, window=window).generate(asked(cases, want))
    assert differing(done, exactly(theirs), 1e-3) == []
    for ours, their in zip(done, theirs, strict=True):  # both have one more sample after a full draft
        columns = (ours.reused, their.reused, ours.behaviour_logprobs, their.behaviour_logprobs)
        both = [(mine, other) for *drafted, mine, other in zip(*columns, strict=True) if all(drafted)]
        assert all(mine == pytest.approx(other, abs=1e-3) for mine, other in both)
    assert 0 < stats.accepted <= stats.drafted
    assert stats.route_faults == 0
    assert bool(differing(done, want, 1e-3)) == (threshold > 0), "a judge that accepts nothing is exact"
    logprobs = [logprob for c in done for logprob in c.behaviour_logprobs]
    stored = sum(logprob < -0.5 and (-0.5 - logprob) * 1024 % 1 == 0 for logprob in logprobs)
    assert (stored > 0) == (threshold > 0)


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
        start(spec_of(saved("qwen3")[1], acceptance="judged", judged=JudgedConfig(path=str(tmp_path))))
