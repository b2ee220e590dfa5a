"""PPO's formulas as pure functions: rewards to advantages, and values to the critic's loss.

Tensors [B, T] run over response tokens. A mask is 1 for tokens of the policy, 0 for those of tools between them and
after the end, and 0 everywhere in a row that has no response or no reward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

VALUE_CLIP = 0.2
"""Clip range around the value before the update."""


def identity(values: Tensor) -> Tensor:
    """The sum over processes when there is only one."""
    return values


# Advantages ----------------------------------------------------------------------------------------------------------


def token_rewards(totals: Tensor, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """RLHF's rewards [B, T] (Ouyang et al. 2022, arXiv 2203.02155): -beta * KL everywhere, the total on the last token.

    Args:
        totals: reward of each response [B]; ignored in masked rows.
        kl: estimate of log(policy / reference) at each token [B, T].
        beta: weight of the penalty.
    """
    left = mask.flip(-1).cumsum(-1).flip(-1)  # tokens of the policy from here on
    ends = mask * (left == 1)  # 1 on the last one of each response
    return ends * totals.nan_to_num()[:, None] - beta * kl * mask


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16): (advantages, returns).

    A_t = delta_t + gamma * lam * A_{t+1} with delta_t = r_t + gamma * V_{t+1} - V_t; nothing follows a response's end.
    t + 1 is the policy's next token; those of tools in between are no steps. The returns are A + V, the critic's
    targets.

    Args:
        rewards, values, mask: [B, T]; values[:, t] is the critic's value before token t.
        gamma: discount per token.
        lam: 1 uses Monte-Carlo returns (no bias), 0 one-step differences (least variance).
    """
    values = values * mask
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    advantage = next_value
    for t in reversed(range(values.shape[1])):
        steps = mask[:, t].bool()
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(steps, delta + gamma * lam * advantage, advantage)
        advantages[:, t] = advantage * mask[:, t]
        next_value = torch.where(steps, values[:, t], next_value)
    return advantages, advantages + values


def rloo(totals: Tensor, group_size: int) -> Tensor:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740): the total minus the mean of the group's others.

    Args:
        totals: [N], groups side by side; NaN marks a row that is left out, also of its group's mean.
        group_size: responses of a prompt.

    Returns: [N]; 0 for rows that are left out and for those without another.
    """
    groups = totals.view(-1, group_size)
    valid = ~groups.isnan()
    others = valid.sum(-1, keepdim=True) - 1
    sum_of_others = groups.nan_to_num().sum(-1, keepdim=True) - groups
    return torch.where(valid & (others > 0), groups - sum_of_others / others.clamp(min=1), 0.0).flatten()


def reinforce_plus_plus(
    rewards: Tensor, mask: Tensor, gamma: float, all_reduce: Callable[[Tensor], Tensor] = identity
) -> Tensor:
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): returns of the tokens [B, T], normalised over the whole batch."""
    returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)
    return whiten(returns, mask, all_reduce)


def whiten(values: Tensor, mask: Tensor, all_reduce: Callable[[Tensor], Tensor] = identity) -> Tensor:
    """Masked values [B, T] minus their mean, over their standard deviation; 0 elsewhere.

    Args: all_reduce: sums a tensor over all processes.
    """
    count, total = all_reduce(torch.stack([mask.sum(), (values * mask).sum()]).double())
    centred = (values - (total / count.clamp(min=1)).to(values.dtype)) * mask
    variance = all_reduce(centred.square().sum().double()) / count.clamp(min=1)
    return centred / (variance.sqrt().to(values.dtype) + 1e-8)


# Loss and penalty ---------------------------------------------------------------------------------------------------


def value_loss(values: Tensor, old: Tensor, returns: Tensor) -> Tensor:
    """Clipped squared error of each value [B, T], halved (as in the PPO of OpenAI baselines), to be minimised.

    max((V - R)^2, (clip(V, old - VALUE_CLIP, old + VALUE_CLIP) - R)^2) / 2.
    """
    near = old + (values - old).clamp(-VALUE_CLIP, VALUE_CLIP)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2
