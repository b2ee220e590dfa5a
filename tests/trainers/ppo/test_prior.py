"""Values without a network: by hand, learned, saved, and independent of the responses that they are the baseline of."""

import json

import pytest
import torch
from accelerate import Accelerator

from specrl.trainers.ppo.prior import Prior


@pytest.fixture
def new_prior():
    return lambda: Prior(Accelerator(cpu=True))


def earn(prior, *returns):
    """A rollout of responses of one token: (prompt, return) of each."""
    prompts, values = zip(*returns, strict=True)
    mask = torch.ones(len(returns), 1)
    prior.learn(prompts, -mask, torch.tensor(values)[:, None], mask)


def test_a_prompt_is_worth_what_its_earlier_responses_earned(new_prior):
    prior = new_prior()
    assert prior.prompt_values(["a", "b"]) == [0.0, 0.0], "nothing is known"
    earn(prior, ("a", 1.0), ("a", 1.0), ("b", 0.5))
    assert prior.prompt_values(["a", "b"]) == pytest.approx([(2 * 0 + 2) / 4, (2 * 0 + 0.5) / 3])
    mean = (0.5 + 0.5 / 3) / 2
    assert prior.prompt_values(["new"]) == pytest.approx([mean])
    earn(prior, ("a", 0.0), ("new", 1.0))
    assert prior.prompt_values(["a", "new"]) == pytest.approx([2 * 0.5 / 3, (2 * mean + 1) / 3])


def rollout(random, rows=32, length=6):
    """Responses whose unlikely tokens lower their reward: (prompts, logp, returns, mask)."""
    logp = torch.where(torch.rand(rows, length, generator=random) < 0.1, -3.0, -0.05)
    mask = torch.ones(rows, length)
    mask[::3, -2:] = 0
    good = ((logp * mask).sum(-1) > -2).float()
    prompts = [f"p{i % 4}" for i in range(rows)]
    return prompts, logp, good[:, None].expand(rows, length) * mask, mask


def test_features_by_hand(new_prior):
    prior = new_prior()
    prior.restore(prior.state() | {"prompts": {"a": 0.5}})
    response = ["a"], torch.tensor([[-0.5, -2.0, -0.25]]), torch.tensor([[1.0, 1.0, 0.0]])
    least = torch.tensor([0.0, -0.5, -2.0], dtype=torch.float64).exp()
    expected = torch.tensor([[1, 0.5, 0, 1], [1, 0.5, -0.5, 1], [1, 0.5, -2.5, 1]], dtype=torch.float64)
    expected[:, 3] = least
    torch.testing.assert_close(prior.features(*response)[0], expected)
    assert prior.values(*response)[0].tolist() == pytest.approx([0.5] * 3), "at first the prompt's value alone"


def test_it_learns_what_unlikely_tokens_cost_and_forgets(new_prior):
    random, prior = torch.Generator().manual_seed(0), new_prior()
    for _ in range(12):
        prior.learn(*rollout(random))
    prompts, logp, returns, mask = rollout(random, rows=256)
    kept = mask.bool()
    missed = (returns - prior.values(prompts, logp, mask))[kept].var() / returns[kept].var()
    assert missed < 0.8, "a constant misses all"
    for _ in range(60):  # from here on every response earns 1
        prior.learn(prompts, logp, mask, mask)
    assert (prior.values(prompts, logp, mask) - 1)[kept].abs().max() < 0.1


def test_a_response_counts_once_however_long_it_is_and_padding_not_at_all(new_prior):
    prompts, logp, returns, mask = rollout(torch.Generator().manual_seed(1))
    short, padded = new_prior(), new_prior()
    short.learn(prompts, logp, returns, mask)
    padded.learn(prompts, *(torch.nn.functional.pad(x, (0, 4)) for x in (logp, returns, mask)))
    assert torch.equal(short.values(prompts, logp, mask), padded.values(prompts, logp, mask))


def test_it_resumes_from_its_saved_state(new_prior):
    random = torch.Generator().manual_seed(2)
    prior, resumed = new_prior(), new_prior()
    prompts, logp, returns, mask = rollout(random)
    prior.learn(prompts, logp, returns, mask)
    resumed.restore(json.loads(json.dumps(prior.state())))
    logp = -torch.rand(mask.shape, generator=random)
    assert torch.equal(prior.values(prompts, logp, mask), resumed.values(prompts, logp, mask))
