"""Metrics of a step over all processes of a run."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

SUMMED = ("_tokens", "/ties", "/control_mismatches", "/failed", "/failed_rows", "/timeouts", "/throughput")


def across_processes(metrics: dict[str, float], accelerator: Accelerator) -> dict[str, float]:
    """Counts and throughput summed over processes, seconds and maxima of the slowest, the rest averaged."""
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
