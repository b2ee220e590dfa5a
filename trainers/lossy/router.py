"""The learned router's examples: steps with the worth of both models' ways on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """One visited prefix with what both models go on with, and what that is worth."""

    problem: str
    """Id of the example."""
    features: tuple[float, ...]
    """The router's input."""
    before: tuple[int, ...]
    """Problem and history."""
    draft_step: tuple[int, ...]
    policy_step: tuple[int, ...]
    draft_value: float
    policy_value: float

    @property
    def advantage(self) -> float:
        """What escalating gains, -1 to 1."""
        return self.policy_value - self.draft_value


def split(records: Sequence[Record], share: float, seed: int) -> tuple[list[Record], list[Record]]:
    """(training, validation) with about `share` of the problems in the second; no problem is in both."""
    problems = sorted({r.problem for r in records})
    random.Random(seed).shuffle(problems)
    held = set(problems[: max(1, round(share * len(problems)))])
    return [r for r in records if r.problem not in held], [r for r in records if r.problem in held]


def accuracy_by_class(scores: Sequence[float], advantages: Sequence[float], threshold: float) -> tuple[float, float]:
    """Share of steps with something to gain that a threshold escalates, and of the others that it keeps."""
    gain = [score > threshold for score, advantage in zip(scores, advantages, strict=True) if advantage > 0]
    rest = [score <= threshold for score, advantage in zip(scores, advantages, strict=True) if advantage <= 0]
    nan = float("nan")
    return sum(gain) / len(gain) if gain else nan, sum(rest) / len(rest) if rest else nan


def curve(scores: Sequence[float], records: Sequence[Record]) -> list[dict[str, float]]:
    """Mean value of the steps that stand when the policy writes a share of them, those with the highest scores."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    points = []
    for tenth in range(11):
        count = round(tenth * len(order) / 10)
        values = [records[i].policy_value for i in order[:count]] + [records[i].draft_value for i in order[count:]]
        points.append({"escalated": count / len(order), "value": sum(values) / len(values)})
    return points
