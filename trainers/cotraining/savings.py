"""What the progress of a drafter saves, by its agreement with the policy."""

from __future__ import annotations

from specrl.rollout.types import EngineStats

DRAFT_TOKENS = 4  # draft length for which agreement is translated into passes


def saved_seconds(stats: EngineStats, tokens: int, agreement: float, initial: float) -> float:
    """Estimate of the seconds by which the initial drafter would have made a rollout of `tokens` tokens longer.

    Fewer tokens of a chain of DRAFT_TOKENS would have been accepted, by the ratio of the expected numbers; each of them
    would have cost its row another pass, at the rollout's mean seconds for the pass of a row.
    """
    now = accepted_per_pass(agreement)
    before = accepted_per_pass(initial)
    fewer = stats.sources.get("model", (0, 0))[1] * (1 - before / now) if now else 0.0
    return (stats.verify_s + stats.decode_s + stats.draft_s) * fewer / max(1, tokens - stats.accepted)


def accepted_per_pass(agreement: float) -> float:
    """Expected tokens that a chain of DRAFT_TOKENS gains, if each is accepted with this probability."""
    return sum(agreement**i for i in range(1, DRAFT_TOKENS + 1))
