"""The entropy router: the policy writes the steps that the draft model is unsure of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollout.steps import Candidate


class EntropyRouter:
    """Escalates a step whose largest rolling mean of the draft's entropy is above the threshold.

    After Entropy Adaptive Decoding (arXiv 2502.06833), which switches models at every token; here per step.

    Args:
        threshold: in nats.
        window: tokens of the rolling mean; shorter steps are averaged whole.
    """

    low, high = 0.0, math.inf
    needs = frozenset({"entropy"})

    def __init__(self, threshold: float, window: int = 4):
        self.threshold, self._window = threshold, window

    def score(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """The largest rolling mean, in nats."""
        return [_peak(candidate.step.entropies, self._window) for candidate in candidates]


def _peak(values: Sequence[float], window: int) -> float:
    width = min(window, len(values))
    return max(sum(values[i : i + width]) / width for i in range(len(values) - width + 1))
