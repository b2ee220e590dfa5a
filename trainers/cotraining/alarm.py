"""An alarm for a drafter that stops being useful. Rollouts stay exact without it, so nothing else would show it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from specrl.rollout.durable import write_durably
from specrl.rollout.reduction import Metric, count, highest, mean
from specrl.rollout.types import EngineStats, RolloutError

logger = logging.getLogger(__name__)

STATE = "alarm.json"
SMOOTHING = 0.8  # weight of the past in the acceptance
MIN_DRAFTED = 64  # tokens before the acceptance is judged
MIN_ACCEPTANCE = 0.05
MIN_SHARE_OF_BEST = 0.4


@dataclass(slots=True)
class AlarmState:
    """What a resumed alarm needs."""

    drafted: float = 0.0
    """Drafted and accepted tokens, smoothed over rollouts."""
    accepted: float = 0.0
    seen: int = 0
    """Drafted tokens in all."""
    best: float = 0.0
    dead: bool = False


class DrafterAlarm:
    """Watches the acceptance of the drafts of `rollout.drafter`, trained or not. A trainers.companions.Companion.

    It warns once when acceptance falls below MIN_ACCEPTANCE or below MIN_SHARE_OF_BEST of its best, or logits are NaN.

    Args: dropped: returns how many samples the drafter has discarded so far because its logits were NaN or infinite.
    """

    def __init__(self, dropped: Callable[[], int] = lambda: 0):
        self._dropped = dropped
        self._dropped_before = dropped()
        self._state = AlarmState()
        self._metrics: dict[str, Metric] = {}

    def observe(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], version: int, stats: EngineStats) -> None:
        """See Companion, also for the four methods that follow."""
        state = self._state
        drafted, accepted = stats.sources.get("model", (0, 0))
        total = self._dropped()
        dropped = total - self._dropped_before
        self._dropped_before = total
        self._metrics = {"drafter/dropped": count(dropped)}
        if drafted:
            state.drafted = SMOOTHING * state.drafted + drafted
            state.accepted = SMOOTHING * state.accepted + accepted
            state.seen += drafted
            self._metrics["drafter/acceptance"] = mean(state.accepted, state.drafted)
        reason = self._reason(dropped)
        if reason and not state.dead:
            logger.warning(
                "The drafter of rollout.drafter is dead: %s. Rollouts stay exact and lose its speed. Distil it again "
                "from the current policy (`python -m specrl.drafter`), co-train it (trainer.drafter.train=true), "
                "or leave it out.",
                reason,
            )
        state.dead = bool(reason)
        self._metrics["drafter/dead"] = highest(state.dead)

    def _reason(self, dropped: int) -> str:
        """Why the drafter is dead; empty if it is not."""
        state = self._state
        if dropped:
            return f"its logits were NaN or infinite, and {dropped} samples of the last rollout were discarded"
        if state.seen < MIN_DRAFTED:
            return ""
        acceptance = state.accepted / state.drafted
        state.best = max(state.best, acceptance)
        if acceptance >= max(MIN_ACCEPTANCE, MIN_SHARE_OF_BEST * state.best):
            return ""
        return (
            f"{acceptance:.1%} of its latest tokens were accepted, at its best {state.best:.1%}, of {state.seen} in all"
        )

    def step(self) -> dict[str, Metric]:
        metrics = self._metrics
        self._metrics = {}
        return metrics

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_durably(directory / STATE, json.dumps(asdict(self._state)).encode())

    def load(self, directory: Path) -> None:
        try:
            self._state = AlarmState(**json.loads((directory / STATE).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise RolloutError(
                f"the state of the drafter's alarm in {directory} cannot be read: {error}. Resume from an older "
                "checkpoint"
            ) from error

    def save_model(self, directory: Path) -> None:
        """Writes nothing: the alarm has no weights."""
