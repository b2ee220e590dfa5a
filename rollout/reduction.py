"""Metrics that carry their reduction, over the parts of an optimiser step and over the processes of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from operator import add

Rule = Callable[[float, float], float]


def _second(_: float, later: float) -> float:
    return later


def _first(value: float, _: float) -> float:
    return value


LATER: dict[str, Rule] = {"count": add, "seconds": add, "highest": max, "lowest": min, "shared": _second}
"""How the value of an operand and that of a later part of the step, such as a micro-batch or a refill, are reduced."""
BESIDE: dict[str, Rule] = {"count": add, "seconds": max, "highest": max, "lowest": min, "shared": _first}
"""How the values of two processes are reduced. They work at the same time, so the slowest sets the seconds."""


class Metric(float):
    """A number of an optimiser step, and how it is reduced.

    Each operand is reduced by its own rule, and the formula is applied to the results. So a ratio of several processes
    is the ratio of their sums, and a speedup that of the slowest processes' seconds; ratios are never averaged.

    Args:
        operands: (rule, value) of each, the rule a key of LATER and BESIDE.
        formula: of the operands' values; a module-level function, as metrics are sent between processes.
    """

    operands: tuple[tuple[str, float], ...]
    formula: Callable[..., float]

    def __new__(cls, operands: Iterable[tuple[str, float]], formula: Callable[..., float] = float):
        operands = tuple(operands)
        self = super().__new__(cls, formula(*(value for _, value in operands)))
        self.operands = operands
        self.formula = formula
        return self

    def __getnewargs__(self):
        return self.operands, self.formula

    def later(self, other: Metric) -> Metric:
        """Reduced with the metric of a later part of the step in the same process."""
        return self._merged(other, LATER)

    def beside(self, other: Metric) -> Metric:
        """Reduced with the metric of another process."""
        return self._merged(other, BESIDE)

    def _merged(self, other: Metric, rules: Mapping[str, Rule]) -> Metric:
        pairs = zip(self.operands, other.operands, strict=True)
        return Metric([(rule, rules[rule](value, others)) for (rule, value), (_, others) in pairs], self.formula)


def count(value: float) -> Metric:
    """A sum: tokens, rows, failures, worker seconds."""
    return Metric([("count", value)])


def seconds(value: float) -> Metric:
    """Wall clock: a sum within a process, the maximum over processes."""
    return Metric([("seconds", value)])


def highest(value: float) -> Metric:
    """A maximum."""
    return Metric([("highest", value)])


def lowest(value: float) -> Metric:
    """A minimum."""
    return Metric([("lowest", value)])


def shared(value: float) -> Metric:
    """A value that is equal in every process that has it; of several parts of a step the latest counts."""
    return Metric([("shared", value)])


def ratio(top: Metric, bottom: Metric) -> Metric:
    """One reduced number over another, each of one operand; NaN over 0."""
    return Metric([*top.operands, *bottom.operands], _quotient)


def mean(total: float, n: float) -> Metric:
    """The mean of n values, such as rows' or tokens', with the sum `total`; NaN for none."""
    return ratio(count(total), count(n))


def _quotient(top: float, bottom: float) -> float:
    return top / bottom if bottom else math.nan


def merged(parts: Iterable[Mapping[str, Metric]], how: Callable[[Metric, Metric], Metric]) -> dict[str, Metric]:
    """The metrics of several parts, reduced by Metric.later or Metric.beside; a part need not have all of them."""
    reduced: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            reduced[name] = how(reduced[name], metric) if name in reduced else metric
    return reduced
