"""SPEC-RL as published, by the transformers engine."""

import copy
import itertools
import math

import pytest
import torch

from specrl.rollout.drafting.draft import Draft
from specrl.rollout.lossy.lenient import NO_WEIGHT, kept
from specrl.rollout.lossy.lenient import lenient as lenient_rule
from specrl.rollout.types import RolloutError
from specrl.rollout.verify import TargetSamples
from specrl.trainers.correction import correction_weights
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
    """Texts of an old policy, their log-probs, and a slightly different new policy."""
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
        assert c.behaviour_logprobs == pytest.approx(old.logprobs, abs=1e-6), "all was accepted: min(q, l p) is q"
        assert c.logprobs == pytest.approx(recomputed(new, prompt, c.tokens), abs=1e-4), "the current policy's"
    assert max(abs(a - b) for c in done for a, b in zip(c.logprobs, c.behaviour_logprobs, strict=True)) > 0.01


def test_tiny_lenience_reuses_nothing(old_rollout):
    _, new, cases, texts = old_rollout
    done, stats, _ = lenient(new, cases, texts, 1e-30)
    plain, _ = engine_of(new).generate(requests_of(cases, visit=8))
    assert differing(done, plain) == []
    assert stats.accepted == 0
    assert not any(any(c.reused) for c in done)
    assert all(c.behaviour_logprobs == [math.inf, *c.logprobs[1:]] for c in done), "the first token is a rejection's"


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
        both = zip(old.logprobs[:n], c.logprobs[:n], strict=True)
        assert c.behaviour_logprobs[:n] == pytest.approx([min(q, p) for q, p in both], abs=1e-6)
        assert c.behaviour_logprobs[n : n + 1] == [math.inf] * (n < len(old.tokens)), "the draw at the rejection"
        assert c.behaviour_logprobs[n + 1 :] == c.logprobs[n + 1 :]
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


# The weights of the loss ----------------------------------------------------------------------------------------------

VOCAB, DISTRIBUTIONS = 5, 200
LENIENCES = pytest.mark.parametrize("lenience", [0.5, 1.0, 2.0])


def of_the_rule(new, old, accepted, lenience):
    """Behaviour log-probs [..., T] where the first `accepted` tokens were accepted and the rest was sampled."""
    behaviour = torch.cat([kept(new[..., :accepted], old[..., :accepted], lenience), new[..., accepted:]], -1)
    behaviour[..., accepted : accepted + 1] = NO_WEIGHT
    return behaviour


def of_the_old_policy(new, old, accepted, lenience):
    """Planted fault: p / q on accepted tokens and 1 on all others."""
    return torch.cat([old[..., :accepted], new[..., accepted:]], -1)


def uncorrected(new, old, accepted, lenience):
    return new


def biases(length, lenience, behaviour, cap=math.inf):
    """Total variation [DISTRIBUTIONS] between the policy and the weighted samples of texts of `length` tokens.

    Enumerates all texts and all positions of the first rejection. Weights are products over the text.
    """
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=length)))
    prefixes = {
        prefix: i for i, prefix in enumerate(p for n in range(length) for p in {*map(tuple, texts[:, :n].tolist())})
    }
    at = torch.tensor([[prefixes[tuple(text[:n])] for n in range(length)] for text in texts.tolist()])
    generator = torch.Generator().manual_seed(length)
    shape = (2, DISTRIBUTIONS, len(prefixes), VOCAB)
    p, q = torch.randn(shape, dtype=torch.float64, generator=generator).log_softmax(-1)
    new, old = p[:, at, texts], q[:, at, texts]
    accept = torch.minimum(q.exp(), lenience * p.exp())
    stays, leaves = accept[:, at, texts], (1 - accept.sum(-1))[:, at] * new.exp()
    weighted = torch.zeros_like(new[..., 0])
    for n in range(length + 1):
        chance = stays[..., :n].prod(-1) * leaves[..., n : n + 1].prod(-1) * new[..., n + 1 :].exp().prod(-1)
        divisor = behaviour(new, old, n, lenience).flatten(0, 1)
        weights = correction_weights(new.flatten(0, 1), divisor, torch.ones_like(divisor), "sequence_truncate", cap)
        weighted += chance * weights[:, 0].view_as(chance)
    return (weighted - new.exp().prod(-1)).abs().sum(-1) / 2


@LENIENCES
@pytest.mark.parametrize("length", [1, 3])
def test_weighted_samples_are_the_policys(length, lenience):
    assert biases(length, lenience, of_the_rule).max() < 1e-12
    planted, plain = (biases(length, lenience, wrong) for wrong in (of_the_old_policy, uncorrected))
    assert min(planted.mean(), plain.mean()) > 0.02, "p / q and no weights at all leave a bias"
    assert biases(length, lenience, of_the_rule, cap=2.0).mean() > 0.01, "so does a cap"
    if lenience < 1:
        assert planted.mean() > plain.mean(), "p / q is then worse than nothing"


def verified(new, old, draft, draws, key, lenience):
    """The real rule's result for drafts and samples under tables of log-probs [VOCAB], the same at every position."""
    own, text = [new[token].item() for token in draws], [new[token].item() for token in draft]
    drawn = TargetSamples(0, list(draws), own, [*text, 0.0])
    return lenient_rule(lenience)(key, Draft(list(draft), "prefix", [old[token].item() for token in draft]), drawn)


@LENIENCES
def test_the_rule_reports_the_log_probs_that_were_enumerated(lenience):
    new, old = torch.tensor([[0.34, 0.34, 0.1, 0.1, 0.12], [0.19, 0.19, 0.25, 0.25, 0.12]]).double().log()
    draft, draws, seen = [2, 4, 3], [0, 1, 0, 2], set()
    for key in range(200):
        stood = verified(new, old, draft, draws, key, lenience)
        n = stood.drafted
        want = of_the_rule(new[[*draft, 2]], old[[*draft, 2]], n, lenience)[: n + 1].tolist()
        assert stood.behaviour[:n] == pytest.approx(want[:n], abs=1e-12)
        assert stood.behaviour[n:] == ([math.inf] if n < 3 else [new[2].item()]), (
            "after a whole draft it is a plain draw"
        )
        seen.add(n)
    assert seen >= {0, 3}
