import math

import pytest
import torch

from specrl.trainers.correction import overlong_penalty
from specrl.trainers.ppo.objectives import gae, reinforce_plus_plus, rloo, token_rewards, whiten

MASK = torch.tensor([[1.0, 1, 1], [1, 1, 0], [0, 0, 0]])
REWARDS = torch.tensor([[0.0, 0, 1], [0.5, -1, 0], [0, 0, 0]])
VALUES = torch.tensor([[0.5, 0.4, 0.6], [1.0, 2.0, 7.0], [3.0, 3.0, 3.0]])


def close(values, want):
    return torch.allclose(torch.as_tensor(values), torch.tensor(want, dtype=torch.float32), atol=1e-6)


@pytest.mark.parametrize(
    ("length", "cap", "buffer", "want"),
    [
        (80, 100, 20, 0.0),  # the greatest length without a penalty
        (81, 100, 20, -0.05),
        (90, 100, 20, -0.5),
        (100, 100, 20, -1.0),
        (250, 100, 20, -1.0),  # never below -1
        (100, 100, 0, 0.0),  # off
        (1, 100, 100, -0.01),
    ],
)
def test_hand_values(length, cap, buffer, want):
    assert overlong_penalty(length, cap, buffer) == pytest.approx(want)


def test_rewards_of_tokens():
    totals = torch.tensor([2.0, -1.0, math.nan])
    kl = torch.tensor([[0.1, -0.2, 0.3], [0.4, 0.5, 9.0], [9.0, 9.0, 9.0]])
    assert close(token_rewards(totals, kl, MASK, 0.0), [[0, 0, 2], [0, -1, 0], [0, 0, 0]])
    want = [[-0.05, 0.1, 2 - 0.15], [-0.2, -1 - 0.25, 0], [0, 0, 0]]
    assert close(token_rewards(totals, kl, MASK, 0.5), want)


@pytest.mark.parametrize(
    ("gamma", "lam", "want"),
    [
        (0.9, 0.8, [[0.16816, 0.428, 0.4], [-0.86, -3, 0], [0, 0, 0]]),  # delta: (-0.14, 0.14, 0.4), (1.3, -3)
        (1.0, 1.0, [[0.5, 0.6, 0.4], [-1.5, -3, 0], [0, 0, 0]]),  # the discounted rewards that follow, minus the value
        (1.0, 0.0, [[-0.1, 0.2, 0.4], [1.5, -3, 0], [0, 0, 0]]),  # delta alone
    ],
)
def test_gae_by_hand(gamma, lam, want):
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=gamma, lam=lam)
    assert close(advantages, want)
    assert torch.allclose(returns, advantages + VALUES * MASK)


GAP = torch.tensor([[1.0, 1, 0, 0, 1, 1, 0]])
"""Two tokens of the policy, two of a tool, two of the policy, padding."""


def across_a_gap(values) -> bool:
    """By hand: as the tokens of the policy alone, one after the other."""
    rewards, critic = torch.zeros(1, 7), torch.tensor([[0.5, 0.4, 9.0, -9.0, 0.6, 0.2, 7.0]])
    rewards[0, 5] = 1
    advantages, returns = values(rewards, critic, GAP, gamma=0.9, lam=0.8)
    # delta: 0.9 * 0.4 - 0.5, 0.9 * 0.6 - 0.4, 0.9 * 0.2 - 0.6, 1 - 0.2; each plus 0.72 times the advantage after it
    last = 0.8
    third = -0.42 + 0.72 * last
    second = 0.14 + 0.72 * third
    want = [[-0.14 + 0.72 * second, second, 0, 0, third, last, 0]]
    return close(advantages, want) and torch.allclose(returns, advantages + critic * GAP)


def test_gae_steps_over_the_tokens_of_tools():
    assert across_a_gap(gae)
    totals, kl = torch.tensor([2.0]), torch.full((1, 7), 0.1)
    assert close(token_rewards(totals, kl, GAP, 0.0), [[0, 0, 0, 0, 0, 2, 0]]), "once, at the end"
    assert close(token_rewards(totals, kl, GAP, 1.0), [[-0.1, -0.1, 0, 0, -0.1, 1.9, 0]])


def test_control_values_of_tokens_of_tools_are_found():
    def every_token(rewards, values, mask, **options):
        """GAE that takes the tool's tokens for steps."""
        return gae(rewards, values, torch.ones_like(mask), **options)

    def ends_at_the_gap(rewards, values, mask, *, gamma, lam):
        advantage, advantages = torch.zeros(1), torch.zeros_like(values)
        following = advantage
        for t in reversed(range(values.shape[1])):
            advantage = (rewards[:, t] + gamma * following - values[:, t] + gamma * lam * advantage) * mask[:, t]
            advantages[:, t] = advantage
            following = values[:, t] * mask[:, t]
        return advantages, advantages + values * mask

    assert not across_a_gap(every_token)
    assert not across_a_gap(ends_at_the_gap)


def test_gae_looks_past_no_end():
    """Values and rewards of padding and of masked rows have no influence. Unmasked padding does."""
    values, rewards = VALUES.clone(), REWARDS.clone()
    values[1, 2], values[2], rewards[1, 2], rewards[2] = -50.0, 50.0, 8.0, 8.0
    base, other = gae(REWARDS, VALUES, MASK, gamma=1.0, lam=0.9)[0], gae(rewards, values, MASK, gamma=1.0, lam=0.9)[0]
    assert torch.equal(base, other)
    assert not torch.equal(base, gae(rewards, values, torch.ones_like(MASK), gamma=1.0, lam=0.9)[0])


def test_leave_one_out_by_hand():
    nan = math.nan
    totals = torch.tensor([1.0, 0, 0, 1, 1, nan, 0, nan, 5, nan, nan, nan, nan, nan, nan, nan])
    want = [2 / 3, -2 / 3, -2 / 3, 2 / 3, 1, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert close(rloo(totals, 4), want)
    assert not close(rloo(totals.nan_to_num(), 4), want), "a failed row is no zero"


def test_reinforce_plus_plus_is_the_normalised_return():
    rewards = torch.tensor([[-0.5, 0, 2], [0, 1, 0], [0, 0, 0]])
    returns = torch.tensor([1.5, 2, 2, 1, 1])  # of the five tokens
    want = (returns - returns.mean()) / returns.std(correction=0)
    assert torch.allclose(reinforce_plus_plus(rewards, MASK, 1.0)[MASK.bool()], want, atol=1e-6)
    assert reinforce_plus_plus(rewards, MASK, 1.0)[MASK == 0].tolist() == [0] * 4


def test_whitening_sees_masked_values_only_and_all_processes():
    values = torch.tensor([[1.0, 2, 3], [4, 6, 99], [99, 99, 99]])
    used = torch.tensor([1.0, 2, 3, 4, 6])
    want = (used - used.mean()) / used.std(correction=0)
    complete = whiten(values, MASK)
    assert torch.allclose(complete[MASK.bool()], want, atol=1e-6)
    assert not torch.allclose(whiten(values, torch.ones_like(MASK))[MASK.bool()], want, atol=1e-2)  # control
    sums = iter([torch.tensor([5.0, 16.0]).double(), torch.tensor((used - 3.2).square().sum().item()).double()])
    part = whiten(values[:1], MASK[:1], all_reduce=lambda own: next(sums))  # in a process that holds only the first row
    assert torch.allclose(part, complete[:1], atol=1e-6)
    assert whiten(values, torch.zeros_like(MASK)).tolist() == [[0] * 3] * 3
