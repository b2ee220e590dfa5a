"""Speedups with confidence intervals, and tokens that rounding changed (docs/metrics.md has the formulas).

The speedup of a run is a ratio of sums, because that is the time it saves; a median of ratios weights easy and hard
steps equally and comes out higher. A single stalled plain step could dominate a sum, so no step's saving may exceed the
largest one below the top tenth. A stall of specrl is not bounded and counts against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, sqrt
from typing import Any

from specrl.results.records import counted, number, total

FEWEST = 6
"""Fewest steps for an interval, which is that of as many blocks; with fewer, no speedup is claimed."""
STUDENT = 2.5706
"""The 97.5 % quantile of Student's t with FEWEST - 1 degrees of freedom."""


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

    The interval is R +- half_width(plain_s - R * specrl_s) / sum(specrl_s) * n / (n - top). The last factor compensates
    for the variance that bounding the `top` largest savings removes.
    """
    n = len(specrl_s)
    seconds = sum(specrl_s)
    if not seconds:
        return None
    plain_s = bounded(specrl_s, plain_s)
    ratio = sum(plain_s) / seconds
    if n < FEWEST:
        return Speedup(ratio, None, None, n)
    deviations = [plain - ratio * specrl for specrl, plain in zip(specrl_s, plain_s, strict=True)]
    half = half_width(deviations) / seconds * n / (n - _top(n))
    return Speedup(ratio, max(ratio - half, 0.0), ratio + half, n)


def half_width(deviations: Sequence[float]) -> float:
    """Half of the 95 % interval of a sum, from the deviations of its terms from their mean, in the order of the steps.

    Neighbouring steps are alike, so the sample is not the steps but FEWEST blocks of consecutive ones (batch means):
    t * sqrt(k / (k - 1) * sum of the squared sums of the k blocks).
    """
    ends = [len(deviations) * block // FEWEST for block in range(FEWEST + 1)]
    sums = [sum(deviations[begin:end]) for begin, end in pairwise(ends)]
    return STUDENT * sqrt(FEWEST / (FEWEST - 1) * sum(part * part for part in sums))


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
