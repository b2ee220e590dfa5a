"""Metrics of a step over all processes of a run."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

SUMMED = ("_tokens", "/ties", "/control_mismatches", "/failed", "/failed_rows", "/timeouts", "/throughput")


def across_processes(metrics: dict[str, float], accelerator: Accelerator) -> dict[str, float]:
    """Counts and throughput summed over processes, seconds and maxima of the slowest, the rest averaged."""
    if accelerator.num_processes == 1:
        return metrics
    names = sorted(set(gather_object(list(metrics))))
    local = torch.tensor([metrics.get(name, torch.nan) for name in names], device=accelerator.device)
    table = accelerator.gather(local).view(-1, len(names)).cpu()
    return {name: reduce_metric(name, column) for name, column in zip(names, table.T, strict=True)}


def reduce_metric(name: str, values: torch.Tensor) -> float:
    """One number from every process's value [world]; NaN marks a process without one."""
    if name.endswith(SUMMED):
        return values.nansum().item()
    if name.startswith("timing_s/") or name.endswith(("_max", "/max")):
        return values.nan_to_num(-torch.inf).max().item()
    if name.endswith("/min"):
        return values.nan_to_num(torch.inf).min().item()
    return values.nanmean().item()


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
