"""Cost against accuracy: what a method pays for an accuracy, and how much less it pays than another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

DRAWS = 2000  # of the bootstrap


@dataclass(frozen=True)
class Curve:
    """One method over its thresholds, on the same problems as every other: arrays [thresholds, problems]."""

    accuracy: np.ndarray
    """Mean over noise seeds."""
    cost: np.ndarray
    """Of any unit, such as tokens written by the policy."""

    def points(self, weights: np.ndarray) -> list[tuple[float, float]]:
        """(cost, accuracy) of each threshold when the problems weigh `weights` [problems], which add up to 1."""
        return list(zip((self.cost @ weights).tolist(), (self.accuracy @ weights).tolist(), strict=True))


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval."""

    mean: float
    low: float
    high: float


def cost_at(points: Sequence[tuple[float, float]], accuracy: float) -> float:
    """Least cost at which the curve reaches an accuracy: linear between neighbouring (cost, accuracy) points.

    Between two thresholds any mixture of them can be had by tossing a coin per response. Infinite when never reached.
    """
    ordered = sorted(points)
    if ordered[0][1] >= accuracy:
        return ordered[0][0]
    for (cost, below), (next_cost, above) in pairwise(ordered):
        if above >= accuracy:
            return cost + (next_cost - cost) * (accuracy - below) / (above - below)
    return inf


def cost_saved(method: Curve, rival: Curve, ends: Curve, gap: float, seed: int = 0) -> Interval:
    """What `method` pays less than `rival` at equal accuracy, as a share of what the policy alone pays.

    Both curves run from the draft alone to the policy alone, which every router is at its extreme thresholds. The
    interval is a percentile bootstrap over problems, each with all its seeds, the same draws for both methods.

    Args:
        ends: the draft alone and the policy alone, in this order.
        gap: the accuracy to compare at, as a share of the way from the draft's to the policy's, 0 to below 1.
        seed: of the bootstrap.
    """
    problems = ends.cost.shape[1]

    def saved(weights: np.ndarray) -> float:
        draft, policy = ends.points(weights)
        accuracy = draft[1] + gap * (policy[1] - draft[1])
        paid = [cost_at([draft, policy, *curve.points(weights)], accuracy) for curve in (method, rival)]
        return (paid[1] - paid[0]) / policy[0]

    counts = np.random.default_rng(seed).multinomial(problems, np.full(problems, 1 / problems), DRAWS)
    found = [saved(drawn / problems) for drawn in counts]
    low, high = np.percentile(found, [2.5, 97.5]).tolist()
    return Interval(saved(np.full(problems, 1 / problems)), low, high)
