"""What is known of a response without a network: by hand, learnt, saved, and without what it is the baseline of."""

import json

import pytest
import torch

from specrl.trainers.ppo.prior import Prior, PromptValues


def test_a_prompt_is_worth_what_its_earlier_responses_earned():
    prompts = PromptValues()
    assert prompts.of(["a", "b"]) == [0.0, 0.0], "nothing is known"
    prompts.learn([("a", 1.0), ("a", 1.0), ("b", 0.5)])
    assert prompts.of(["a", "b"]) == pytest.approx([(2 * 0 + 2) / 4, (2 * 0 + 0.5) / 3])
    usual = (0.5 + 0.5 / 3) / 2
    assert prompts.of(["new"]) == pytest.approx([usual]), "as the others"
    prompts.learn([("a", 0.0), ("new", 1.0)])
    assert prompts.of(["a", "new"]) == pytest.approx([2 * 0.5 / 3, (2 * usual + 1) / 3])


def test_it_goes_on_from_what_was_saved():
    prompts = PromptValues()
    prompts.learn([("a", 1.0), ("b", 0.25)])
    again = PromptValues(json.loads(json.dumps(prompts.state())))
    assert again.of(["a", "b", "c"]) == prompts.of(["a", "b", "c"])


def one_process(sums):
    return sums


def rollout(prior, random, rows=32, length=6):
    """Responses whose unlikely tokens cost them their reward: (facts, returns, mask)."""
    logp = torch.where(torch.rand(rows, length, generator=random) < 0.1, -3.0, -0.05)
    mask = torch.ones(rows, length)
    mask[::3, -2:] = 0
    good = ((logp * mask).sum(-1) > -2).float()
    prompts = [f"p{i % 4}" for i in range(rows)]
    return prior.facts(prompts, logp, mask), good[:, None].expand(rows, length) * mask, mask, prompts


def test_facts_by_hand():
    prior = Prior()
    prior.prompts.learn([("a", 1.0), ("a", 1.0)])
    facts = prior.facts(["a"], torch.tensor([[-0.5, -2.0, -0.25]]), torch.tensor([[1.0, 1.0, 0.0]]))
    least = torch.tensor([0.0, -0.5, -2.0], dtype=torch.float64).exp()
    expected = torch.tensor([[1, 0.5, 0, 1], [1, 0.5, -0.5, 1], [1, 0.5, -2.5, 1]], dtype=torch.float64)
    expected[:, 3] = least
    torch.testing.assert_close(facts[0], expected)
    assert prior.values(facts)[0].tolist() == pytest.approx([0.5] * 3), "the prompt's value, before anything is learnt"


def test_it_learns_what_unlikely_tokens_cost_and_forgets():
    random, prior = torch.Generator().manual_seed(0), Prior()
    for _ in range(12):
        facts, returns, mask, _ = rollout(prior, random)
        prior.learn(facts, returns, mask, one_process)
    facts, returns, mask, _ = rollout(prior, random, rows=256)
    kept = mask.bool()
    missed = (returns - prior.values(facts))[kept].var() / returns[kept].var()
    assert missed < 0.8, "a constant misses all"
    for _ in range(60):  # another world, in which every response earns 1
        prior.learn(facts, mask, mask, one_process)
    assert (prior.values(facts) - 1)[kept].abs().max() < 0.1


def test_a_response_counts_once_however_long_it_is_and_padding_not_at_all():
    random = torch.Generator().manual_seed(1)
    short, padded = Prior(), Prior()
    facts, returns, mask, _ = rollout(short, random)
    short.learn(facts, returns, mask, one_process)
    longer = [torch.nn.functional.pad(x, (0, 0, 0, 4) if x.dim() == 3 else (0, 4)) for x in (facts, returns, mask)]
    padded.learn(*longer, one_process)
    assert torch.equal(short.values(facts), padded.values(facts))


def test_a_prior_goes_on_from_what_was_saved():
    random, prior, again = torch.Generator().manual_seed(2), Prior(), Prior()
    facts, returns, mask, prompts = rollout(prior, random)
    prior.learn(facts, returns, mask, one_process)
    prior.prompts.learn(zip(prompts, returns[:, 0].tolist(), strict=True))
    again.restore(json.loads(json.dumps(prior.state())))
    facts = prior.facts(prompts, -torch.rand(mask.shape, generator=random), mask)
    assert torch.equal(prior.values(facts), again.values(facts))
