"""SPEC-RL as published, by the transformers engine."""

import copy

import pytest
import torch

from rollout.types import RolloutError
from tests.rollout.golden import (
    SAMPLING,
    Script,
    differing,
    engine_of,
    prompts_and_caps,
    requests_of,
)


@pytest.fixture(scope="module")
def old_rollout(build_model):
    """Texts of an old policy, their log-probs, and a new policy that is somewhat different."""
    old = build_model("llama", 0)
    new = copy.deepcopy(old)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in new.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05 * p.std())
    cases = [(prompt, 24) for prompt, _ in prompts_and_caps(24)]
    texts, _ = engine_of(old).generate(requests_of(cases, visit=7))
    assert {c.finish for c in texts} == {"stop", "length"}
    return old, new, cases, texts


def lenient(model, cases, texts, lenience, visit=8, sampling=SAMPLING):
    drafters = [Script(c.tokens) for c in texts]
    requests = requests_of(cases, drafters, visit)
    for request, c in zip(requests, texts, strict=True):
        request.draft_logprobs = c.logprobs
    done, stats = engine_of(model, sampling, lenience=lenience).generate(requests)
    return done, stats, drafters


def recomputed(model, prompt, tokens):
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def test_huge_lenience_reuses_the_whole_stored_text(old_rollout):
    _, new, cases, texts = old_rollout
    done, stats, _ = lenient(new, cases, texts, 1e30)
    assert [c.tokens for c in done] == [c.tokens for c in texts]
    assert [c.finish for c in done] == [c.finish for c in texts]
    assert all(all(c.reused) for c in done)
    assert stats.passes == 1
    for (prompt, _), c, old in zip(cases, done, texts, strict=True):
        assert c.behaviour_logprobs == pytest.approx(old.logprobs, abs=1e-6), "the law that produced the token"
        assert c.logprobs == pytest.approx(recomputed(new, prompt, c.tokens), abs=1e-4), "the current policy's"
    assert max(abs(a - b) for c in done for a, b in zip(c.logprobs, c.behaviour_logprobs, strict=True)) > 0.01


def test_tiny_lenience_reuses_nothing(old_rollout):
    _, new, cases, texts = old_rollout
    done, stats, _ = lenient(new, cases, texts, 1e-30)
    plain, _ = engine_of(new).generate(requests_of(cases, visit=8))
    assert differing(done, plain) == []
    assert stats.accepted == 0
    assert not any(any(c.reused) for c in done)
    assert all(c.behaviour_logprobs == c.logprobs for c in done)


def test_the_same_policy_reuses_everything_at_lenience_one(old_rollout):
    old, _, cases, texts = old_rollout
    done, _, _ = lenient(old, cases, texts, 1.0)
    assert [c.tokens for c in done] == [c.tokens for c in texts]
    assert all(all(c.reused) for c in done)
    for c in done:
        assert c.logprobs == pytest.approx(c.behaviour_logprobs, abs=1e-4)


def test_published_rule_drafts_one_round_only(old_rollout):
    _, new, cases, texts = old_rollout
    done, stats, drafters = lenient(new, cases, texts, 1.0)
    assert {d.calls for d in drafters} == {1}
    cuts = [c.reused.index(False) if False in c.reused else len(c.reused) for c in done]
    assert all(not any(c.reused[n:]) for c, n in zip(done, cuts, strict=True))
    assert any(0 < n < len(c.tokens) for c, n in zip(done, cuts, strict=True)), "some rows were cut in the middle"
    assert 0 < stats.accepted < stats.drafted
    for (prompt, _), c, old, n in zip(cases, done, texts, cuts, strict=True):
        assert c.tokens[:n] == old.tokens[:n]
        assert c.behaviour_logprobs[:n] == pytest.approx(old.logprobs[:n], abs=1e-6)
        assert c.behaviour_logprobs[n:] == c.logprobs[n:]
        assert c.logprobs == pytest.approx(recomputed(new, prompt, c.tokens), abs=1e-4)


def test_a_truncated_text_is_continued_under_a_larger_cap(old_rollout):
    old, _, cases, texts = old_rollout
    longer = [(prompt, 40) for prompt, _ in cases]
    done, _, _ = lenient(old, longer, texts, 1.0, visit=7)
    plain, _ = engine_of(old).generate(requests_of(longer, visit=7))
    assert differing(done, plain, 1e-4) == [], "the same keys and policy: text and continuation are plain decoding's"
    continued = [c for c, t in zip(done, texts, strict=True) if t.finish == "length"]
    assert continued
    for c in continued:
        assert c.reused == [True] * 24 + [False] * (len(c.tokens) - 24)
        assert len(c.tokens) > 24
    shorter = [(prompt, 10) for prompt, _ in cases]
    done, _, _ = lenient(old, shorter, texts, 1.0)
    for c, t in zip(done, texts, strict=True):
        assert c.tokens == t.tokens[:10]
        assert c.finish == ("stop" if len(t.tokens) <= 10 and t.finish == "stop" else "length")


def test_lenient_without_stored_logprobs_is_an_error(old_rollout):
    old, _, cases, texts = old_rollout
    engine = engine_of(old, lenience=1.0)
    with pytest.raises(RolloutError, match="log-probs"):
        engine.generate(requests_of(cases, [Script(c.tokens) for c in texts]))
    assert differing(engine.generate(requests_of(cases, visit=7))[0], texts) == [], "rows without a draft are plain"
