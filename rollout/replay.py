"""Which share of the slots replays its last key: a fixed one, or one chosen from the measured reuse gap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

FIRST = 1 / 8  # enough replayed rows to measure a gap, too few for it to matter
ERRORS = 2  # the bound lies this many standard errors above the estimate
FORGET = 0.75  # weight that a measurement keeps from one visit to the next, as the policy moves on

Cluster = tuple[int, float]
"""Replayed rows of one prompt on one control step, and the sum of their rewards' differences to fresh twins."""


def reuse_gap(clusters: Sequence[Cluster]) -> tuple[float, float]:
    """Mean difference per row and its standard error, with prompts as clusters; see `Gap`."""
    gap = Gap()
    gap.add(clusters)
    return gap.estimate()


class Gap:
    """Mean reward of replayed rows minus that of their fresh twins, from weighted clusters.

    A ratio estimate over c clusters of n rows with summed difference d: gap = sum(d) / sum(n), with variance
    c / (c - 1) * sum((d - gap * n)^2) / sum(n)^2. Rows of one prompt are alike, so prompts are what is independent.
    """

    def __init__(self, sums: Sequence[float] = (0.0,) * 6):
        self.sums = list(sums)
        """Weighted c, n, d; and, with squared weights, n^2, n*d, d^2."""

    def add(self, clusters: Iterable[Cluster]) -> None:
        for n, d in clusters:
            self.sums = [a + b for a, b in zip(self.sums, (1, n, d, n * n, n * d, d * d), strict=True)]

    def forget(self, keep: float) -> None:
        """Multiplies the weight of everything so far by `keep`."""
        self.sums = [a * b for a, b in zip(self.sums, [keep] * 3 + [keep**2] * 3, strict=True)]

    def estimate(self) -> tuple[float, float]:
        """Gap and standard error: NaN and infinity without rows, infinity with a single cluster."""
        c, n, d, nn, nd, dd = self.sums
        if not n:
            return math.nan, math.inf
        gap = d / n
        if c <= 1:
            return gap, math.inf
        return gap, math.sqrt(max(0.0, c / (c - 1) * (dd - 2 * gap * nd + gap**2 * nn))) / n


def next_share(share: float, gap: float, error: float, budget: float) -> float:
    """The share of the next visit: the largest that keeps the batch's gap within the budget, at most twice the last.

    A batch in which a share s of the rows is replayed has s times the gap of a replayed row; its upper bound is
    s * (|gap| + 2 errors). Without an error the share stays.

    Args: share of the last visit; gap and standard error of a replayed row and budget of a batch, in units of reward.
    """
    if not math.isfinite(error):
        return share
    bound = abs(gap) + ERRORS * error
    return min(1.0, 2 * share, budget / bound if bound else 1.0)


class ReplayControl:
    """The share of each visit so far. All keys follow from it, so it is saved with every checkpoint.

    With `auto` the share of a visit is chosen when its first batch is asked for, from what control steps before it
    measured; never from the batch it is for.

    Args:
        replay: the share of every visit, or "auto".
        budget: with "auto", the largest gap of a batch in units of the reward; 0 never replays.
    """

    def __init__(self, replay: float | Literal["auto"], budget: float):
        self._replay, self._budget = replay, budget
        self.shares: list[float] = []
        """By visit; the first is of no effect, as there is nothing to replay."""
        self._gap = Gap()

    def until(self, visit: int) -> list[float]:
        """The shares of visits 0 to `visit` and maybe later ones; those not chosen yet are chosen now."""
        while len(self.shares) <= visit:
            self.shares.append(self._choose() if self._replay == "auto" else self._replay)
        return self.shares

    def guess(self, visit: int) -> list[float]:
        """The shares of visits 0 to `visit`, without choosing any: one not chosen yet may still become another."""
        share = self.shares[-1:] or [0.0] if self._replay == "auto" else [self._replay]
        return self.shares + share * (visit + 1 - len(self.shares))

    def observe(self, clusters: Iterable[Cluster]) -> None:
        """Takes in what a control step measured; every process must pass the clusters of all."""
        self._gap.add(clusters)

    def _choose(self) -> float:
        if len(self.shares) < 2:
            return FIRST if self.shares and self._budget else 0.0
        share = next_share(self.shares[-1], *self._gap.estimate(), self._budget)
        self._gap.forget(FORGET)
        return share

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON types."""
        return {"shares": self.shares, "gap": self._gap.sums}

    def restore(self, state: dict[str, Any]) -> None:
        self.shares, self._gap = list(state["shares"]), Gap(state["gap"])
