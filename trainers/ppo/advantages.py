"""Pure functions from rewards to advantages. Tensors [B, T] run over response tokens; their mask is 1 up to the end of
a response and 0 after it, and 0 everywhere in a row that has no response or no reward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def token_rewards(totals: Tensor, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """RLHF's rewards [B, T] (Ouyang et al. 2022, arXiv 2203.02155): -beta * KL everywhere, the total on the last token.

    Args:
        totals: reward of each response [B]; that of a masked row is not read.
        kl: estimate of log(policy / reference) at each token [B, T].
        mask: [B, T].
        beta: weight of the penalty.
    """
    ends = mask * (1 - torch.nn.functional.pad(mask, (0, 1))[:, 1:])  # 1 on the last token of each response
    return ends * totals.nan_to_num()[:, None] - beta * kl * mask


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16): (advantages, returns).

    A_t = delta_t + gamma * lam * A_{t+1} with delta_t = r_t + gamma * V_{t+1} - V_t; nothing follows a response's end.
    The returns are A + V, what the critic is trained towards.

    Args:
        rewards, values, mask: [B, T]; values[:, t] is the critic's value before token t.
        gamma: discount per token.
        lam: 1 takes whole returns (no bias), 0 one-step differences (least variance).
    """
    values, advantages = values * mask, torch.zeros_like(values)
    following = advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        advantage = (delta + gamma * lam * advantage) * mask[:, t]
        following, advantages[:, t] = values[:, t], advantage
    return advantages, advantages + values


def rloo(totals: Tensor, group_size: int) -> Tensor:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740): the total minus the mean of the group's others.

    Args:
        totals: [N], groups side by side; NaN marks a row that takes no part, in its group's mean neither.
        group_size: responses of a prompt.

    Returns: [N]; 0 for rows that take no part and for those without another.
    """
    groups = totals.view(-1, group_size)
    valid = ~groups.isnan()
    others = valid.sum(-1, keepdim=True) - 1
    rest = groups.nan_to_num().sum(-1, keepdim=True) - groups
    return torch.where(valid & (others > 0), groups - rest / others.clamp(min=1), 0.0).flatten()


def reinforce_plus_plus(
    rewards: Tensor, mask: Tensor, gamma: float, total: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor:
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): returns of the tokens, normalised over the whole batch.

    Args: rewards, mask [B, T]; gamma and total as in `gae` and `whiten`.
    """
    returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    return whiten(returns, mask, total)


def whiten(values: Tensor, mask: Tensor, total: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """Masked values [B, T] minus their mean, over their standard deviation; 0 elsewhere.

    Args: total: turns this process's sums into those of all processes (identity for one process).
    """
    count, summed = total(torch.stack([mask.sum(), (values * mask).sum()]).double())
    centred = (values - (summed / count.clamp(min=1)).to(values.dtype)) * mask
    variance = total(centred.square().sum().double()) / count.clamp(min=1)
    return centred / (variance.sqrt().to(values.dtype) + 1e-8)
