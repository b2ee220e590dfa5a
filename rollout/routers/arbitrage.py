"""The learned router after Arbitrage (arXiv 2512.05033): would the policy's step be worth more than the draft's?

Arbitrage asks a classifier of the text. This one asks what the policy finds unlikely, now and before: a step that the
policy doubts is likely wrong, and after an earlier mistake there is less to gain. Logistic regression on two numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rollout.routers.pair import read_card
from rollout.steps import Candidate, Step
from rollout.types import RolloutError

MOST = 50.0  # nats; a token that top-k or top-p rules out would be infinitely unlikely


class ArbitrageRouter:
    """Escalates where the probability of a positive advantage is above the threshold.

    Args:
        weights: of the features, in their order, and last the bias.
        threshold: 0 to 1; higher keeps more draft steps.
    """

    low, high = 0.0, 1.0
    needs = frozenset({"likelihood"})

    def __init__(self, weights: Sequence[float], threshold: float = 0.5):
        *self._weights, self._bias = weights
        self.threshold = threshold

    def score(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Probability that the policy's step is worth more."""
        return [self.probability(features(candidate)) for candidate in candidates]

    def probability(self, values: Sequence[float]) -> float:
        """The same for `features` that are known already."""
        logit = self._bias + sum(w * x for w, x in zip(self._weights, values, strict=True))
        return (1 + math.tanh(logit / 2)) / 2  # the logistic function, which overflows for no logit

    @classmethod
    def load(
        cls, folder: str | Path, *, draft: str, policy: str, separators: Sequence[str], threshold: float = 0.5
    ) -> ArbitrageRouter:
        """The router that `specrl.train_router` wrote to `folder`.

        Args: draft, policy: fingerprints of the pair at work; separators: where its steps end.

        Raises:
            RolloutError: it belongs to another pair or other steps, or it is none.
        """
        card = read_card(folder, "arbitrage", draft=draft, policy=policy, separators=list(separators))
        weights = card.get("weights")
        if not (isinstance(weights, list) and len(weights) == 3 and all(isinstance(w, float) for w in weights)):
            raise RolloutError(f"the router in {folder} has weights={weights}, not two and a bias; train it again")
        return cls(weights, threshold)


def features(candidate: Candidate) -> tuple[float, float]:
    """log(1 + s) for s = -log p of the policy's least likely token: of the step, and of all before it."""
    return math.log1p(_surprise([candidate.step])), math.log1p(_surprise(candidate.history))


def _surprise(steps: Sequence[Step]) -> float:
    """In nats, 0 without any token."""
    return min(MOST, max((-logprob for step in steps for logprob in step.policy_logprobs), default=0.0))
