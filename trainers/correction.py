"""Corrections of the training signal: rewards of overlong responses, importance weights of off-policy tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specrl.rollout.reduction import Metric, highest, lowest, mean


def overlong_penalty(length: int, cap: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to cap - buffer, then linear to -1 at cap.

    `length` of the response, `cap` and `buffer` are in tokens; `buffer=0` disables the penalty.
    """
    if buffer <= 0 or length <= cap - buffer:
        return 0.0
    return max((cap - buffer - length) / buffer, -1.0)


def correction_weights(logp: Tensor, behaviour: Tensor, mask: Tensor, mode: str, cap: float) -> Tensor:
    """Importance weights [B, T] for tokens that were not sampled from the current policy.

    The ratio is exp(logp - behaviour) per token, or that of the summed log-probs per sequence. `truncate` clips it at
    `cap` (truncated importance sampling, Espeholt et al. 2018); `mask` sets ratios above `cap` or below 1 / cap to 0.

    Args:
        logp: log-probs under the current policy [B, T].
        behaviour: log-probs under the distribution that sampled the tokens [B, T]; infinite for a weight of 0.
        mask: 1 for response tokens [B, T].
        mode: none, token_truncate, token_mask, sequence_truncate or sequence_mask.
        cap: at least 1.
    """
    if mode == "none":
        return torch.ones_like(logp)
    log_ratio = (logp - behaviour).masked_fill(mask == 0, 0.0)  # inf times 0 would be NaN
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(logp)
    ratio = log_ratio.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(max=cap)
    return torch.where((ratio > cap) | (ratio < 1 / cap), 0.0, ratio)


def measured_weights(
    logp: Tensor, behaviour: Tensor, mask: Tensor, mode: str, cap: float
) -> tuple[Tensor, dict[str, Metric]]:
    """`correction_weights`, and metrics of the weights of response tokens."""
    ratios = correction_weights(logp, behaviour, mask, mode, cap)
    used = ratios[mask.bool()]
    if not used.numel():
        return ratios, {}
    name = "sampling/importance_sampling_ratio"
    return ratios, {
        f"{name}/min": lowest(used.min().item()),
        f"{name}/mean": mean(used.sum().item(), used.numel()),
        f"{name}/max": highest(used.max().item()),
    }


def padded(rows: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """Rows of numbers as a tensor [B, T] with the shape, dtype and device of `like`, right-padded with 0."""
    tensor = torch.zeros_like(like)
    for i, row in enumerate(rows):
        tensor[i, : len(row)] = torch.tensor(row)
    return tensor
