"""Fits of judges and routers: logistic regressions, and how well their scores order the examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from specrl.rollout.lossy.judge import JudgeHead

PENALTIES = tuple(10.0**-i for i in range(5))  # of a judge's squared weights, tried from strong to weak


def logistic(
    x: Tensor, y: Tensor, ridge: float, balance: Tensor | None = None, iterations: int = 500
) -> tuple[Tensor, Tensor]:
    """Logistic regression by L-BFGS: weights [F] and bias, in the dtype of `x`, independent of the order of the rows.

    Args:
        x: features [N, F].
        y: targets [N], 0 or 1.
        ridge: penalty on the squared weights, not on the bias, so that separable targets have a finite solution.
        balance: weight of each row [N].
        iterations: maximum of L-BFGS.
    """
    weights = torch.zeros(x.shape[1], dtype=x.dtype, requires_grad=True)
    bias = torch.zeros((), dtype=x.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=iterations, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = binary_cross_entropy_with_logits(x @ weights + bias, y.to(x.dtype), balance)
        value = value + ridge * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weights.detach(), bias.detach()


def roc_auc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Probability that a positive scores above a negative, ties counting half; NaN without both classes."""
    column = torch.tensor(scores, dtype=torch.float64)
    order = column.sort().values
    ranks = (torch.searchsorted(order, column) + torch.searchsorted(order, column, right=True) - 1).double() / 2
    positive = torch.tensor(labels, dtype=torch.bool)
    n = int(positive.sum())
    others = len(labels) - n
    if not n or not others:
        return math.nan
    return (ranks[positive].sum().item() - n * (n - 1) / 2) / (n * others)


# Judges --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Labels:
    """Mismatches that were tried out: the policy's hidden states, and whether the answer changed."""

    hidden: Tensor
    """The policy's final hidden states [N, H] float32 after the draft tokens."""
    important: Tensor
    """[N] bool."""
    problem: Tensor
    """[N] int64, the problem of each; a fifth of the problems is held out."""

    def __len__(self) -> int:
        return len(self.important)

    @property
    def held_out(self) -> Tensor:
        """[N] bool, the validation rows; no problem is in both sets."""
        return self.problem % 5 == 0


def fit_judge(labels: Labels, recall: float) -> tuple[JudgeHead, float] | None:
    """A head whose threshold catches a share of `recall` of the important held-out mismatches, and its ROC-AUC there.

    Logistic regression on standardised states, as one dot product on raw ones. Both classes have the same total weight.
    The L2 penalty with the best ROC-AUC on the held-out mismatches wins. None if a set has fewer than two mismatches of
    one class.
    """
    held_out = labels.held_out
    important = labels.important
    if min(int((kind & side).sum()) for kind in (important, ~important) for side in (held_out, ~held_out)) < 2:
        return None
    states = labels.hidden[~held_out]
    targets = important[~held_out]
    truth = important[held_out].tolist()
    mean = states.mean(0)
    scale = states.std(0).clamp(min=1e-6)
    share = targets.float().mean()
    balance = torch.where(targets, 0.5 / share, 0.5 / (1 - share))
    fits = []
    for penalty in PENALTIES:
        standard_weight, standard_bias = logistic((states - mean) / scale, targets, penalty, balance, iterations=100)
        weight = standard_weight / scale
        bias = (standard_bias - (weight * mean).sum()).item()
        logits = labels.hidden[held_out] @ weight + bias
        fits.append((roc_auc(logits.tolist(), truth), weight, bias, logits.sigmoid().tolist()))
    area, weight, bias, chances = max(fits, key=lambda fit: fit[0])
    judge = JudgeHead(weight, bias, threshold_for_recall(chances, truth, recall))
    judge.usual_share = sum(judge.unimportant(labels.hidden)) / len(labels)
    return judge, area


def threshold_for_recall(scores: Sequence[float], labels: Sequence[bool], recall: float) -> float:
    """The largest threshold at which a share of at least `recall` of the positives scores at or above it."""
    positive = sorted((s for s, label in zip(scores, labels, strict=True) if label), reverse=True)
    caught = max(1, math.ceil(recall * len(positive)))
    return positive[caught - 1]


# Routers -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """A draft step, and what the policy's step in its place gains."""

    problem: int
    """Number of the example; a fifth of the problems is held out."""
    features: tuple[float, ...]
    """The router's input."""
    advantage: float
    """What escalating gains, -1 to 1."""
    draft_logprobs: tuple[float, ...]
    """Of the step, under the draft model."""
    policy_logprobs: tuple[float, ...]
    """Of the step, under the policy."""


def usual_gaps(scores: Sequence[float], records: Sequence[Record], thresholds: int) -> list[float]:
    """By how many nats a token the kept draft steps are more likely under the draft model than under the policy.

    Args: thresholds: number of equally spaced thresholds from 0 to 1; one that keeps nothing has 0.
    """
    gaps = []
    for i in range(thresholds):
        kept = [r for score, r in zip(scores, records, strict=True) if score <= i / (thresholds - 1)]
        total = sum(sum(r.draft_logprobs) - sum(r.policy_logprobs) for r in kept)
        gaps.append(total / max(1, sum(len(r.draft_logprobs) for r in kept)))
    return gaps
