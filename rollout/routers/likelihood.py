"""The likelihood router: the policy writes the steps that it finds unlikely itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollout.steps import Candidate


class LikelihoodRouter:
    """Escalates a step with a token whose log-prob under the policy is below minus the threshold.

    Nothing to train. One token decides, as one wrong number makes a step wrong however likely the rest of it is. It
    costs a pass of the policy over each draft step, which is a verification: at threshold 0 a response is the policy's
    own by exact speculative decoding (but for tokens whose probability rounds to 1, which stand), and a higher
    threshold keeps more of the draft's text.

    Args:
        threshold: in nats, 0 or more; a token of probability p is as unlikely as -log p.
    """

    low, high = 0.0, math.inf
    needs = frozenset({"likelihood"})

    def __init__(self, threshold: float):
        self.threshold = threshold

    def score(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """-log p of the least likely token of each step."""
        return [-min(candidate.step.policy_logprobs) for candidate in candidates]
