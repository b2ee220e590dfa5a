"""The reuse gap: how the rewards of replayed rows differ from those of the same rows with fresh noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

Cluster = tuple[int, float]
"""Replayed rows of one prompt on one control step, and the sum of the differences of their rewards to fresh rows."""


def reuse_gap(clusters: Sequence[Cluster]) -> tuple[float, float]:
    """Mean reward of replayed rows minus that of fresh rows of the same prompts and samples, and its standard error.

    A ratio estimate over c clusters of n rows with summed difference d: gap = sum(d) / sum(n), with variance
    c / (c - 1) * sum((d - gap * n)^2) / sum(n)^2. Rows of one prompt are correlated; prompts are independent.

    Returns: NaN and infinity without rows, an infinite error with a single cluster.
    """
    rows = sum(n for n, _ in clusters)
    if not rows:
        return math.nan, math.inf
    gap = sum(d for _, d in clusters) / rows
    count = len(clusters)
    if count == 1:
        return gap, math.inf
    squares = sum((d - gap * n) ** 2 for n, d in clusters)
    return gap, math.sqrt(count / (count - 1) * squares) / rows
