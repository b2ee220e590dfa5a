"""Reward-guided speculative decoding (RSD, arXiv 2501.19324): keep a draft step that scores well by itself."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.routers.base import Scorer
from rollout.steps import Candidate


class RSDRouter:
    """Escalates a step whose process reward s_d is below `least`, also where the policy would do no better.

    Args:
        scorer: process reward of each candidate step, 0 to 1.
        least: RSD's threshold on s_d; the published code takes 0.7.
    """

    low, high = 0.0, 1.0
    needs: frozenset[str] = frozenset()

    def __init__(self, scorer: Scorer, least: float = 0.7):
        self._scorer, self.threshold = scorer, 1 - least

    def score(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """1 - s_d."""
        return [1 - score for score in self._scorer(candidates)]
