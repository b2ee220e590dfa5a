"""Speedups with confidence intervals, and tokens that rounding changed (docs/metrics.md has the formulas).

The speedup of a run is a ratio of sums, because that is the time it saves; a median of ratios weights easy and hard
steps equally and comes out higher. A single stalled plain step could dominate a sum, so no step's saving may exceed the
largest one below the top tenth. A stall of specrl is not bounded and counts against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import NormalDist
from typing import Any

from specrl.results.records import counted, number, total

FEWEST = 6
"""Fewest steps for an interval; with fewer, no speedup is claimed."""


@dataclass(frozen=True)
class Speedup:
    """Ratio of plain to specrl seconds of the same steps, with a 95 % interval that is None below FEWEST steps.

    Example: Speedup(2.5, 2.1, 2.9, 14)
    """

    ratio: float
    low: float | None
    high: float | None
    steps: int

    @property
    def told(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        if self.low is None:
            return f"too few to tell, {self.steps} of the {FEWEST} steps that it takes"
        return self.brief if self.told else f"not distinguishable from 1x ({self.brief})"

    @property
    def brief(self) -> str:
        """The interval, with the ratio if the interval excludes 1; empty without an interval."""
        interval = "" if self.low is None else f"95 % interval {self.low:.2f}x to {self.high:.2f}x"
        return f"{self.ratio:.2f}x ({interval})" if self.told else interval


def bounded(own: Sequence[float], plain: Sequence[float]) -> list[float]:
    """Plain seconds of each step, reduced so that no saving exceeds the largest saving below the top tenth.

    The top tenth is at least one step. If no steps are below it, every saving is at most 0.
    """
    top = _top(len(own))
    below = sorted(p - o for o, p in zip(own, plain, strict=True))[:-top]
    most = below[-1] if below else 0.0
    return [o + min(p - o, most) for o, p in zip(own, plain, strict=True)]


def speedup(own: Sequence[float], plain: Sequence[float]) -> Speedup | None:
    """The ratio R of the sums of `bounded` plain seconds and of specrl's seconds; None if nothing was timed.

    The interval is R +- t * s * sqrt(n) / sum(own) * n / (n - top), where s is the standard deviation of
    plain - R * own over the n steps and t is Student's quantile. The last factor compensates for the variance that
    bounding the `top` largest savings removes.
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
    """The 97.5 % quantile of Student's t (Cornish-Fisher expansion), accurate to 0.01 from 4 degrees of freedom on."""
    z = NormalDist().inv_cdf(0.975)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def _top(steps: int) -> int:
    return max(1, ceil(steps / 10))


@dataclass(frozen=True)
class Flips:
    """Tokens that differ from plain decoding. Only a row's first one counts, because the prefixes differ after it."""

    count: int
    tokens: int
    """Number of tokens compared: in each row, up to and including its first flip."""
    position: float
    """Mean number of tokens in a row before its flip; 0 without flips."""

    def told(self, dtype: str = "") -> str:
        """The result as a clause. Args: dtype: of the weights that responses are sampled with, if known."""
        if not self.count:
            return f"none of {self.tokens:,} tokens differs from plain decoding's"
        rate = f"{1000 * self.count / self.tokens:.2g} of 1,000 tokens come out otherwise than in plain decoding"
        where = f"{counted(self.count, 'row')}, after {self.position:.0f} tokens on average"
        what = f"{f'in {dtype} ' * bool(dtype)}{rate} ({where})"
        return f"{what}: rounding, as between any two batch sizes of the same engine. The law is unchanged"


def flips(steps: Sequence[Mapping[str, Any]]) -> Flips | None:
    """The flips on the control steps among `steps`; None without control steps."""
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
