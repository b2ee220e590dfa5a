"""Pure functions on log-probs and values: PPO's losses, and its KL penalty."""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(logp: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Clipped surrogate of each token [B, T] (PPO, Schulman et al. 2017, arXiv 1707.06347, eq. 7), to be minimised.

    -min(r * A, clip(r, 1 - low, 1 + high) * A) with r = exp(logp - old).

    Args:
        logp: log-probs under the policy being trained [B, T].
        old: under the policy that began the update [B, T], without gradient.
        advantages: [B, T].
        low, high: clip range; `high` above `low` is DAPO's clip-higher.
    """
    ratio = (logp - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def clipped(logp: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Where `policy_loss` has no gradient, as 0/1 [B, T]: (ratio too low, ratio too high)."""
    ratio = (logp - old).exp()
    too_low, too_high = (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)
    return too_low.to(logp.dtype), too_high.to(logp.dtype)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Clipped squared error of each value [B, T], halved (as in the PPO of OpenAI baselines), to be minimised.

    max((V - R)^2, (clip(V, old - clip, old + clip) - R)^2) / 2; `clip=0` is the plain error.
    """
    error = (values - returns).square()
    if clip:
        near = old + (values - old).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return error / 2


def kl_estimate(logp: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) at each token [B, T], never negative: ratio * (exp(gap) - 1 - gap).

    gap = reference - logp makes Schulman's k3 ("Approximating KL divergence", 2020), and ratio = exp(logp - old) weighs
    the tokens, which `old` sampled, as the policy would (DeepSeek-V3.2, arXiv 2512.02556; use_bias_correction_kl of
    TRL's GRPO). Its mean over the samples is the KL, and the mean of its gradient the KL's gradient, for any `old`.
    Without the ratio k3's gradient would be that of KL(reference || policy) where old = logp.
    """
    gap = reference - logp
    return (logp - old).exp() * (gap.exp() - 1 - gap)


def adapted_beta(beta: float, kl: float, target: float) -> float:
    """The KL weight after a rollout (Ziegler et al. 2019, arXiv 1909.08593, sec. 2.2): at most 2 % up or down.

    beta * (1 + 0.1 * clip(kl / target - 1, -0.2, 0.2)).
    """
    return beta * (1 + 0.1 * min(max(kl / target - 1, -0.2), 0.2))
