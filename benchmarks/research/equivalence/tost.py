"""Equivalence of paired samples: two one-sided t-tests (Schuirmann 1987) and their power. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, stdev
from typing import Literal

ALPHA, POWER = 0.05, 0.8
Verdict = Literal["equivalent", "different", "underpowered", "not shown"]


@dataclass(frozen=True)
class Comparison:
    """What paired differences say about a margin; all in the unit of the differences."""

    n: int
    mean: float
    sd: float
    low: float
    high: float
    """The 90 % interval of the mean; inside the margin is the same as both tests passing at 5 %."""
    p: float
    """The larger p-value of the two one-sided tests."""
    p_zero: float
    """Two-sided p-value of a mean of zero."""
    power: float
    """Chance of passing with this spread and number of pairs if the true difference is zero."""
    needed: int
    """Pairs at which that chance reaches POWER."""
    verdict: Verdict


def compare(differences: Sequence[float], margin: float) -> Comparison:
    """Tests whether the mean lies within +-margin.

    Equal pairs (a spread of zero) are equivalent exactly if their difference is within the margin. `underpowered` says
    that the sample could not have shown equivalence; a difference that is shown needs no power.

    Raises:
        ValueError: fewer than two pairs, or a margin that is not positive.
    """
    n = len(differences)
    if n < 2 or margin <= 0:
        raise ValueError(f"{n} pairs and margin {margin} were given; a comparison needs two pairs and a margin above 0")
    mean, sd, df = fmean(differences), stdev(differences), n - 1
    if sd == 0:
        inside = abs(mean) < margin
        verdict = "equivalent" if inside else "different"
        return Comparison(n, mean, 0.0, mean, mean, float(not inside), float(mean == 0), 1.0, 2, verdict)
    error = sd / math.sqrt(n)
    p = max(1 - t_cdf((mean + margin) / error, df), t_cdf((mean - margin) / error, df))
    p_zero, half = 2 * t_cdf(-abs(mean) / error, df), t_quantile(1 - ALPHA, df) * error
    found = power(n, sd, margin)
    if p < ALPHA and found >= POWER:
        verdict: Verdict = "equivalent"
    elif p_zero < ALPHA and p >= ALPHA:
        verdict = "different"
    else:
        verdict = "underpowered" if found < POWER else "not shown"
    return Comparison(n, mean, sd, mean - half, mean + half, p, p_zero, found, pairs_needed(sd, margin), verdict)


def power(n: int, sd: float, margin: float) -> float:
    """Chance that both tests pass when the true difference is zero: 2 T(margin / error - t) - 1."""
    df = n - 1
    return max(0.0, 2 * t_cdf(margin * math.sqrt(n) / sd - t_quantile(1 - ALPHA, df), df) - 1)


def pairs_needed(sd: float, margin: float) -> int:
    """Pairs at which `power` reaches POWER; starts from the normal approximation."""
    z = NormalDist().inv_cdf
    n = max(2, int(((z(1 - ALPHA) + z((1 + POWER) / 2)) * sd / margin) ** 2))
    while power(n, sd, margin) < POWER:
        n += 1
    return n


def t_cdf(t: float, df: int) -> float:
    """Cumulative distribution of Student's t: Simpson's rule on the substitution x = sqrt(df) tan(angle)."""
    steps, edge = 100, math.atan(abs(t) / math.sqrt(df))
    at = [math.cos(i * edge / steps) ** (df - 1) for i in range(steps + 1)]
    area = (at[0] + at[-1] + 4 * sum(at[1::2]) + 2 * sum(at[2:-1:2])) * edge / steps / 3
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    return 0.5 + math.copysign(scale * area, t)


@cache
def t_quantile(p: float, df: int) -> float:
    """The t with `t_cdf(t) = p`, by bisection."""
    low, high = -1e3, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2
