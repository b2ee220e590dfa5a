"""Metrics that know how they are reduced: over the parts of an optimiser step, and over the processes of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from operator import add, sub


def _second(_: float, later: float) -> float:
    return later


def _first(one: float, _: float) -> float:
    return one


LATER = {"count": add, "seconds": add, "highest": max, "lowest": min, "shared": _second}
"""What becomes of an operand and its value in a later part of the step, such as a micro-batch or a refill."""
BESIDE = {"count": add, "seconds": max, "highest": max, "lowest": min, "shared": _first}
"""What becomes of an operand and another process's. They work at the same time, so the slowest sets the seconds."""


class Metric(float):
    """A number of an optimiser step, and how it is reduced.

    Each operand is reduced by its own rule, and the formula is applied to what comes out. So a ratio of several
    processes is the ratio of their sums, and a speedup that of the slowest processes' seconds; no mean of ratios.

    Args:
        operands: (rule, value) of each, the rule a key of LATER and BESIDE.
        formula: of the operands' values; a function of a module, as metrics are sent between processes.
    """

    def __new__(cls, operands: Iterable[tuple[str, float]], formula: Callable[..., float] = float):
        operands = tuple(operands)
        self = super().__new__(cls, formula(*(value for _, value in operands)))
        self.operands = operands
        self.formula = formula
        return self

    def __getnewargs__(self):
        return self.operands, self.formula

    def later(self, other: Metric) -> Metric:
        """With what a later part of the step in the same process has."""
        return self._merged(other, LATER)

    def beside(self, other: Metric) -> Metric:
        """With what another process has."""
        return self._merged(other, BESIDE)

    def _merged(self, other: Metric, rules: Mapping[str, Callable[[float, float], float]]) -> Metric:
        pairs = zip(self.operands, other.operands, strict=True)
        return Metric([(rule, rules[rule](value, others)) for (rule, value), (_, others) in pairs], self.formula)


def count(value: float) -> Metric:
    """What adds up: tokens, rows, failures, worker seconds."""
    return Metric([("count", value)])


def seconds(value: float) -> Metric:
    """Wall clock: adds up within a process; of several processes the slowest's."""
    return Metric([("seconds", value)])


def highest(value: float) -> Metric:
    """The largest of all."""
    return Metric([("highest", value)])


def lowest(value: float) -> Metric:
    """The smallest of all."""
    return Metric([("lowest", value)])


def shared(value: float) -> Metric:
    """What every process that has it knows for all of them; of several parts of a step the latest counts."""
    return Metric([("shared", value)])


def ratio(top: Metric, bottom: Metric) -> Metric:
    """One reduced number over another, each of one operand; NaN over 0."""
    return Metric([*top.operands, *bottom.operands], _quotient)


def mean(total: float, n: float) -> Metric:
    """Of n things, such as rows or tokens, whose values add up to `total`; NaN for none."""
    return ratio(count(total), count(n))


def difference(one: Metric, other: Metric) -> Metric:
    """One reduced number less another, each of one operand."""
    return Metric([*one.operands, *other.operands], sub)


def _quotient(top: float, bottom: float) -> float:
    return top / bottom if bottom else math.nan


def merged(parts: Iterable[Mapping[str, Metric]], how: Callable[[Metric, Metric], Metric]) -> dict[str, Metric]:
    """Metrics of several parts as those of all, by Metric.later or Metric.beside; a part need not have all of them."""
    together: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            together[name] = how(together[name], metric) if name in together else metric
    return together
