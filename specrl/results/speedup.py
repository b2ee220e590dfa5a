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
    def is_significant(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        if self.low is None:
            return f"too few to tell, {self.steps} of the {FEWEST} steps that it takes"
        interval = f"95 % interval {self.low:.2f}x to {self.high:.2f}x"
        return f"{self.ratio:.2f}x ({interval})" if self.is_significant else f"not distinguishable from 1x ({interval})"


def bounded(specrl_s: Sequence[float], plain_s: Sequence[float]) -> list[float]:
    """Plain seconds of each step, reduced so that no saving exceeds the largest saving below the top tenth.

    The top tenth is at least one step. If no steps are below it, every saving is at most 0.
    """
    savings = [plain - specrl for specrl, plain in zip(specrl_s, plain_s, strict=True)]
    below = sorted(savings)[: -_top(len(savings))]
    most = below[-1] if below else 0.0
    return [specrl + min(saving, most) for specrl, saving in zip(specrl_s, savings, strict=True)]


def speedup(specrl_s: Sequence[float], plain_s: Sequence[float]) -> Speedup | None:
    """The ratio R of the sums of `bounded` plain seconds and of specrl's seconds; None if nothing was timed.

    The interval is R +- t * s * sqrt(n) / sum(specrl_s) * n / (n - top), where s is the standard deviation of
    plain_s - R * specrl_s over the n steps and t is Student's quantile. The last factor compensates for the variance
    that bounding the `top` largest savings removes.
    """
    n = len(specrl_s)
    seconds = sum(specrl_s)
    if not seconds:
        return None
    plain_s = bounded(specrl_s, plain_s)
    ratio = sum(plain_s) / seconds
    if n < FEWEST:
        return Speedup(ratio, None, None, n)
    squares = sum((plain - ratio * specrl) ** 2 for specrl, plain in zip(specrl_s, plain_s, strict=True))
    half = student(n - 1) * sqrt(squares / (n - 1)) * sqrt(n) / seconds * n / (n - _top(n))
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

    def sentence(self, dtype: str = "") -> str:
        """The result as a clause. Args: dtype: of the weights that responses are sampled with, if known."""
        if not self.count:
            return f"none of {self.tokens:,} tokens differs from plain decoding's"
        rate = f"{1000 * self.count / self.tokens:.2g} of 1,000 tokens differ from plain decoding's"
        where = f"{counted(self.count, 'row')}, after {self.position:.0f} tokens on average"
        return (
            f"{f'in {dtype} ' if dtype else ''}{rate} ({where}): rounding, as between any two batch sizes of the same "
            "engine. The sampling distribution is unchanged"
        )


def flips(steps: Sequence[Mapping[str, Any]]) -> Flips | None:
    """The flips on the control steps among `steps`; None without control steps."""
    tokens = total(steps, "spec/compared_tokens")
    if not tokens:
        return None
    differing = [record for record in steps if number(record, "spec/control_mismatches")]
    count = total(differing, "spec/control_mismatches")
    before = sum(record["spec/control_mismatches"] * record["spec/flip_position"] for record in differing)
    return Flips(int(count), int(tokens), before / count if count else 0.0)
