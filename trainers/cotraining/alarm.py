"""An alarm for a drafter that dies in silence, trained or not: rollouts stay exact, so nothing else would tell."""

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
ENOUGH = 64  # drafted tokens that an acceptance is judged by
FLOOR, FALL = 0.05, 0.4  # it has died below the first, or below that share of its best


@dataclass(slots=True)
class Watched:
    """What a resumed alarm knows."""

    drafted: float = 0.0
    accepted: float = 0.0
    """Tokens of its drafts, those of older rollouts weighing less."""
    seen: int = 0
    """Drafted tokens in all."""
    best: float = 0.0
    dead: bool = False


class DrafterAlarm:
    """Watches what becomes of the drafts of `rollout.drafter`. A trainers.companions.Companion.

    It says once that acceptance has fallen far below what it was, has never been worth a draft, or that logits are NaN.

    Args: dropped: gives how many draws the drafter has thrown away so far because its logits were NaN or infinite.
    """

    def __init__(self, dropped: Callable[[], int] = lambda: 0):
        self._dropped, self._before = dropped, dropped()
        self._state = Watched()
        self._metrics: dict[str, Metric] = {}

    def observe(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], version: int, stats: EngineStats) -> None:
        """See Companion, as of the four that follow."""
        state = self._state
        drafted, accepted = stats.sources.get("model", (0, 0))
        total = self._dropped()
        dropped, self._before = total - self._before, total
        self._metrics = {"drafter/dropped": count(dropped)}
        if drafted:
            state.drafted = SMOOTHING * state.drafted + drafted
            state.accepted = SMOOTHING * state.accepted + accepted
            state.seen += drafted
            self._metrics["drafter/acceptance"] = mean(state.accepted, state.drafted)
        reason = self._reason(state, dropped)
        if reason and not state.dead:
            logger.warning(
                "The drafter of rollout.drafter is dead: %s. Rollouts stay exact and lose its speed. Distil it again "
                "from the policy as it is now (`python -m specrl.drafter`), co-train it (trainer.drafter.train=true), "
                "or leave it out.",
                reason,
            )
        state.dead = bool(reason)
        self._metrics["drafter/dead"] = highest(state.dead)

    def _reason(self, state: Watched, dropped: int) -> str:
        if dropped:
            return f"its logits were NaN or infinite, and {dropped} draws of the last rollout were thrown away"
        if state.seen < ENOUGH:
            return ""
        now = state.accepted / state.drafted
        state.best = max(state.best, now)
        if now >= max(FLOOR, FALL * state.best):
            return ""
        return f"of its latest tokens {now:.1%} stood, of all {state.seen} at its best {state.best:.1%}"

    def step(self) -> dict[str, Metric]:
        metrics, self._metrics = self._metrics, {}
        return metrics

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_durably(directory / STATE, json.dumps(asdict(self._state)).encode())

    def load(self, directory: Path) -> None:
        try:
            self._state = Watched(**json.loads((directory / STATE).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise RolloutError(
                f"the state of the drafter's alarm in {directory} cannot be read: {error}. Resume from an older "
                "checkpoint"
            ) from error

    def save_model(self, directory: Path) -> None:
        """Nothing: the drafter is its own."""
