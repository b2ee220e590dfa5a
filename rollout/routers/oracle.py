"""The oracle of Arbitrage (arXiv 2512.05033): escalate where the policy's step is worth more than the draft's."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.routers.base import Scorer
from rollout.steps import Candidate


class OracleRouter:
    """Escalates by the advantage s_t - s_d of the policy's step over the draft's from the same prefix.

    It sees both steps, so it saves nothing: it is the bound of every other router, and the teacher of the learned one.
    Best for the sum of step scores when decisions do not influence later steps.

    Args:
        advantage: s_t - s_d of candidates that carry their rival, -1 to 1.
        threshold: 0 escalates exactly where there is something to gain.
    """

    low, high = -1.0, 1.0
    needs = frozenset({"rival", "likelihood"})  # reading first spares the policy what both steps begin with

    def __init__(self, advantage: Scorer, threshold: float = 0.0):
        self._advantage, self.threshold = advantage, threshold

    def score(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """The advantage."""
        return self._advantage(candidates)
