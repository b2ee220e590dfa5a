"""An alarm for a drafter that stops being useful. It costs a rollout only speed, so nothing else would show it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from specrl.rollout.reduction import Metric, count, highest, mean
from specrl.rollout.types import EngineStats

logger = logging.getLogger(__name__)

SMOOTHING = 0.8  # weight of the past in the acceptance
MIN_DRAFTED = 64  # tokens before the acceptance is judged
MIN_ACCEPTANCE = 0.05
MIN_SHARE_OF_BEST = 0.4


class DrafterAlarm:
    """Watches the acceptance of the drafts of `rollout.drafter`, trained or not.

    It warns once when acceptance falls below MIN_ACCEPTANCE or below MIN_SHARE_OF_BEST of its best, or logits are NaN.
    A resumed run starts to measure anew.

    Args: dropped: returns how many samples the drafter has discarded so far because its logits were NaN or infinite.
    """

    def __init__(self, dropped: Callable[[], int] = lambda: 0):
        self._dropped = dropped
        self._dropped_before = dropped()
        self._drafted = 0.0  # drafted and accepted tokens, smoothed over rollouts
        self._accepted = 0.0
        self._seen = 0  # drafted tokens in all
        self._best = 0.0
        self._dead = False

    def observe(self, stats: EngineStats) -> dict[str, Metric]:
        """Takes the statistics of a rollout and returns the drafter's metrics."""
        drafted, accepted = stats.sources.get("model", (0, 0))
        total = self._dropped()
        dropped = total - self._dropped_before
        self._dropped_before = total
        metrics = {"drafter/dropped": count(dropped)}
        if drafted:
            self._drafted = SMOOTHING * self._drafted + drafted
            self._accepted = SMOOTHING * self._accepted + accepted
            self._seen += drafted
            metrics["drafter/acceptance"] = mean(self._accepted, self._drafted)
        reason = self._reason(dropped)
        if reason and not self._dead:
            logger.warning(
                "The drafter of rollout.drafter is dead: %s. Rollouts lose its speed. Distil it again "
                "from the current policy (`python -m specrl.drafter`), co-train it (trainer.drafter.train=true), "
                "or leave it out.",
                reason,
            )
        self._dead = bool(reason)
        return metrics | {"drafter/dead": highest(self._dead)}

    def _reason(self, dropped: int) -> str:
        """Why the drafter is dead; empty if it is not."""
        if dropped:
            return f"its logits were NaN or infinite, and {dropped} samples of the last rollout were discarded"
        if self._seen < MIN_DRAFTED:
            return ""
        acceptance = self._accepted / self._drafted
        self._best = max(self._best, acceptance)
        if acceptance >= max(MIN_ACCEPTANCE, MIN_SHARE_OF_BEST * self._best):
            return ""
        return f"{acceptance:.1%} of its latest tokens were accepted, at its best {self._best:.1%}, of {self._seen}"
