"""Metrics of a rollout as TRL has them."""

from __future__ import annotations

import torch


def response_metrics(
    lengths: torch.Tensor, ended: torch.Tensor, rewards: torch.Tensor, group_size: int
) -> dict[str, float]:
    """Rewards and lengths of all rows of a rollout, groups side by side, under TRL's names.

    Args:
        lengths: tokens of each response [N], 0 where there is none.
        ended: True where there is one that ended by EOS [N].
        rewards: total rewards, NaN where there is none [N].
        group_size: responses of a prompt.
    """
    groups = rewards.view(-1, group_size)
    known = ~groups.isnan().all(-1)
    low, high = groups.nan_to_num(torch.inf).amin(-1), groups.nan_to_num(-torch.inf).amax(-1)
    scored = rewards[~rewards.isnan()]
    metrics = {
        "reward": scored.mean().item(),
        "reward_std": scored.std(correction=int(len(scored) > 1)).item(),
        "frac_reward_zero_std": (high - low)[known].eq(0).float().mean().item(),
        "completions/clipped_ratio": 1 - ended[lengths > 0].float().mean().item(),
    }
    for kind, chosen in (("", lengths > 0), ("terminated_", ended)):
        if len(found := lengths[chosen].float()):
            for name, value in (("mean", found.mean()), ("min", found.min()), ("max", found.max())):
                metrics[f"completions/{name}_{kind}length"] = value.item()
    return metrics
