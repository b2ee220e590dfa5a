"""What a router is, and how a decision is taken when a router misbehaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout.lossy.steps import Candidate

Scorer = Callable[[Sequence[Candidate]], Sequence[float]]
"""One number per candidate. Scorers are handed in, so that nothing here knows rewards."""


class Router(Protocol):
    """Decides for each draft step whether the policy writes that step instead."""

    threshold: float
    """A candidate whose score is above it is escalated to the policy."""
    low: float
    high: float
    """What a score can be; anything else is a fault."""
    needs: frozenset[str]
    """What candidates must carry: `entropy` (Step.entropies), `likelihood` (Step.policy_logprobs, which takes a pass of
    the policy over each draft step), `rival` (Candidate.rival)."""

    def score(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """How much each candidate wants the policy; higher escalates."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a router said about a batch of candidates."""

    escalate: list[bool]
    faults: int = 0
    """Candidates that go to the policy because the router failed on them."""
    reason: str = ""
    """The first failure, in words."""


def decide(router: Router, candidates: Sequence[Candidate]) -> Decision:
    """Escalates every candidate whose score is above the threshold, or that the router could not score.

    A router that raises, or returns another number of scores, fails on all of them; a score that is NaN or out of range
    fails on its own. Failing means the policy's own path, which is always right, only slower.
    """
    try:
        scores = [float(score) for score in router.score(candidates)]
        if len(scores) != len(candidates):
            raise ValueError(f"{len(scores)} scores for {len(candidates)} candidates")
    except Exception as error:  # whatever a learned or user-written router does
        reason = f"the router failed: {type(error).__name__}: {error}"
        return Decision([True] * len(candidates), len(candidates), reason)
    bad = [score for score in scores if not router.low <= score <= router.high]  # NaN is in no range
    reason = f"the router gave {bad[0]}, not in {router.low:g}..{router.high:g}" if bad else ""
    most = min(router.threshold, router.high)
    return Decision([not router.low <= score <= most for score in scores], len(bad), reason)
