"""How much faster, how sure, and how many tokens rounding changed (docs/metrics.md has the formulas).

The speedup of a run is a ratio of sums, since that is the time it saves: a median of ratios counts an easy step as much
as a hard one, and comes out higher. But one stalled plain step moves a sum as far as it likes, so no step may save more
than the largest saving below the top tenth. A stall on specrl's own side counts against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import NormalDist
from typing import Any

from specrl.results.records import counted, number, total

FEWEST = 6
"""Steps from which on an interval is given; of fewer nothing is claimed."""


@dataclass(frozen=True)
class Speedup:
    """Plain over specrl seconds of the same steps, with its 95 % interval; the interval is None below FEWEST steps.

    Example: Speedup(2.5, 2.1, 2.9, 14)
    """

    ratio: float
    low: float | None
    high: float | None
    steps: int

    @property
    def told(self) -> bool:
        """Whether the seconds differ by more than their noise."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        if self.low is None:
            return f"too few to tell, {self.steps} of the {FEWEST} steps that it takes"
        return self.brief if self.told else f"not distinguishable from 1x ({self.brief})"

    @property
    def brief(self) -> str:
        """The interval, and the ratio where it tells from 1x; empty without an interval."""
        interval = "" if self.low is None else f"95 % interval {self.low:.2f}x to {self.high:.2f}x"
        return f"{self.ratio:.2f}x ({interval})" if self.told else interval


def bounded(own: Sequence[float], plain: Sequence[float]) -> list[float]:
    """Plain seconds of each step, where no step saves more than the largest saving below the top tenth.

    The top tenth is at least one step; where nothing is left below it, a step saves nothing, and can only lose.
    """
    top = _top(len(own))
    below = sorted(p - o for o, p in zip(own, plain, strict=True))[:-top]
    most = below[-1] if below else 0.0
    return [o + min(p - o, most) for o, p in zip(own, plain, strict=True)]


def speedup(own: Sequence[float], plain: Sequence[float]) -> Speedup | None:
    """The ratio of the sums of `bounded` plain and of own seconds, R; None when nothing was timed.

    Its interval is R +- t * s * sqrt(n) / sum(own) * n / (n - top): s is the standard deviation of plain - R * own over
    the n steps, t Student's quantile, and the last factor makes good the spread that bounding `top` steps took away.
    """
    n, whole = len(own), sum(own)
    if not whole:
        return None
    kept = bounded(own, plain)
    ratio = sum(kept) / whole
    if n < FEWEST:
        return Speedup(ratio, None, None, n)
    spread = sqrt(sum((p - ratio * o) ** 2 for o, p in zip(own, kept, strict=True)) / (n - 1))
    half = student(n - 1) * spread * sqrt(n) / whole * n / (n - _top(n))
    return Speedup(ratio, max(ratio - half, 0.0), ratio + half, n)


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, to 0.01 from 4 degrees of freedom on (Cornish and Fisher's expansion)."""
    z = NormalDist().inv_cdf(0.975)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def _top(steps: int) -> int:
    return max(1, ceil(steps / 10))


@dataclass(frozen=True)
class Flips:
    """Draws that came out otherwise than in plain decoding: the first of each row, as another text follows it."""

    count: int
    tokens: int
    """That were compared: of each row up to and including its first flip."""
    position: float
    """Mean number of a row's tokens before its flip; 0 without one."""

    def told(self, dtype: str = "") -> str:
        """In a sentence. Args: dtype: of the weights that responses are drawn with, where it is known."""
        if not self.count:
            return f"none of {self.tokens:,} tokens differs from plain decoding's"
        rate = f"{1000 * self.count / self.tokens:.2g} of 1,000 tokens come out otherwise than in plain decoding"
        where = f"{counted(self.count, 'row')}, after {self.position:.0f} tokens on average"
        what = f"{f'in {dtype} ' * bool(dtype)}{rate} ({where})"
        return f"{what}: rounding, as between any two batch sizes of the same engine. The law is unchanged"


def flips(steps: Sequence[Mapping[str, Any]]) -> Flips | None:
    """Over the control steps among these; None where there is none."""
    if not (tokens := total(steps, "spec/compared_tokens")):
        return None
    found = [
        (count, number(record, "spec/flip_position") or 0.0)
        for record in steps
        if (count := number(record, "spec/control_mismatches"))
    ]
    count = sum(count for count, _ in found)
    before = sum(count * position for count, position in found)
    return Flips(int(count), int(tokens), before / count if count else 0.0)
