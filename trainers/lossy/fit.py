"""Logistic regression, and how well scores order what they are for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def logistic(
    x: Tensor, y: Tensor, ridge: float, balance: Tensor | None = None, iterations: int = 500
) -> tuple[Tensor, Tensor]:
    """Logistic regression by L-BFGS: weights [F] and bias, in the dtype of `x`; the same for any order of the rows.

    Args:
        x: features [N, F].
        y: targets [N], 0 or 1.
        ridge: penalty on the squared weights, the bias free, so that separable targets have a finite answer.
        balance: weight of each row [N].
        iterations: of L-BFGS, at most.
    """
    weights, bias = torch.zeros(x.shape[1], dtype=x.dtype), torch.zeros((), dtype=x.dtype)
    optimizer = torch.optim.LBFGS(
        [weights.requires_grad_(), bias.requires_grad_()], max_iter=iterations, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = binary_cross_entropy_with_logits(x @ weights + bias, y.to(x.dtype), balance)
        value = value + ridge * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weights.detach(), bias.detach()


def ranks(values: Sequence[float]) -> Tensor:
    """Place of each value in their order, from 0 [N] float64; equal values share their mean place."""
    given = torch.tensor(values, dtype=torch.float64)
    order = given.sort().values
    return (torch.searchsorted(order, given) + torch.searchsorted(order, given, right=True) - 1).double() / 2


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation of two sequences, equal values sharing their mean rank; 0 where one of them is constant."""
    x, y = (places - places.mean() for places in (ranks(a), ranks(b)))
    scale = (x.norm() * y.norm()).item()
    return (x @ y).item() / scale if scale else 0.0


def roc_auc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Chance that a positive scores above a negative, ties counting half; NaN without both classes."""
    positive = torch.tensor(labels, dtype=torch.bool)
    n, others = int(positive.sum()), int((~positive).sum())
    if not n or not others:
        return float("nan")
    return (ranks(scores)[positive].sum().item() - n * (n - 1) / 2) / (n * others)
