"""Training of a judge head: logistic regression on hidden states, with a threshold that catches what matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specrl.rollout.lossy.judge import JudgeHead
from specrl.trainers.lossy.fit import logistic, roc_auc

PENALTIES = tuple(10.0**-i for i in range(5))  # of the squared weights, tried from strong to weak


@dataclass(frozen=True, slots=True)
class Labels:
    """Mismatches that were tried out: what the policy's states say, and whether the answer changed."""

    hidden: Tensor
    """The policy's final hidden states [N, H] float32 after the draft tokens."""
    important: Tensor
    """[N] bool."""
    problem: Tensor
    """[N] int64, which problem each is of: a fifth of the problems is held out."""

    def __len__(self) -> int:
        return len(self.important)

    @property
    def held(self) -> Tensor:
        """[N] bool, what is not learned from; no problem is on both sides."""
        return self.problem % 5 == 0


def fit_judge(labels: Labels, recall: float) -> tuple[JudgeHead, float] | None:
    """A head whose threshold catches a share of `recall` of the important mismatches of held-out problems.

    With it its ROC-AUC on these problems. None where a side has fewer than two mismatches of one kind.
    """
    held, important = labels.held, labels.important
    if min(int((kind & side).sum()) for kind in (important, ~important) for side in (held, ~held)) < 2:
        return None
    weight, bias, area = fit_head(labels.hidden[~held], important[~held], labels.hidden[held], important[held])
    chances = (labels.hidden[held] @ weight + bias).sigmoid().tolist()
    return JudgeHead(weight, bias, threshold_for_recall(chances, important[held].tolist(), recall)), area


def fit_head(features: Tensor, important: Tensor, held: Tensor, held_important: Tensor) -> tuple[Tensor, float, float]:
    """Logistic regression of `important` on standardised features, as one dot product on raw ones.

    Both classes weigh the same in all. The L2 penalty with the best ROC-AUC on the held-out rows wins.

    Args: features [N, H], held [M, H] float; important [N], held_important [M] bool, both classes in each.
    Returns: weight [H], bias, and that ROC-AUC.
    """
    mean, scale = features.mean(0), features.std(0).clamp(min=1e-6)
    share = important.float().mean()
    balance = torch.where(important, 0.5 / share, 0.5 / (1 - share))
    fitted = []
    for penalty in PENALTIES:
        weight, bias = logistic((features - mean) / scale, important, penalty, balance, iterations=100)
        weight = weight / scale
        bias = (bias - (weight * mean).sum()).item()
        fitted.append((weight, bias, roc_auc((held @ weight + bias).tolist(), held_important.tolist())))
    return max(fitted, key=lambda found: found[2])


def threshold_for_recall(scores: Sequence[float], labels: Sequence[bool], recall: float) -> float:
    """The largest threshold at which a share of at least `recall` of the positives scores at or above it."""
    positive = sorted((s for s, label in zip(scores, labels, strict=True) if label), reverse=True)
    kept = max(1, -int(-recall * len(positive) // 1))  # rounded up
    return positive[kept - 1]
