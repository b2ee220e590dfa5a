"""A rollout with its rewards, and the checks that a rollout must pass before it is scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from specrl.rollout.types import RolloutBatch, RolloutError, Row


@dataclass
class Scored:
    """Rows that were rolled out and scored: their dataset rows, prompts, responses and rewards."""

    inputs: list[dict]
    rows: list[Row]
    batch: RolloutBatch
    rewards: list[float | None]
    """Total rewards, including the overlong penalty; None where the reward or the response failed."""
    unpenalised_rewards: list[float | None]
    """Total rewards without the penalty."""

    def __add__(self, later: Scored) -> Scored:
        names = [field.name for field in fields(Scored)]
        return Scored(*(getattr(self, name) + getattr(later, name) for name in names))

    def select(self, indices: Sequence[int]) -> Scored:
        """The rows with these indices, in this order."""
        return Scored(
            inputs=[self.inputs[i] for i in indices],
            rows=[self.rows[i] for i in indices],
            batch=self.batch.select(indices),
            rewards=[self.rewards[i] for i in indices],
            unpenalised_rewards=[self.unpenalised_rewards[i] for i in indices],
        )


def check_batch(batch: RolloutBatch, rows: int, version: int) -> None:
    """Raises RolloutError for missing, malformed or stale responses.

    Trainers would accept log-probs of the wrong length and stale responses silently, and crash on empty responses.
    """
    if len(batch.completions) != rows:
        raise RolloutError(f"the engine returned {len(batch.completions)} responses for {rows} rows")
    for i, c in enumerate(batch.completions):
        if not c.failure and not 0 < len(c.tokens) == len(c.logprobs) == len(c.behaviour_logprobs) == len(c.reused):
            raise RolloutError(f"the engine returned a malformed response for row {i}: {len(c.tokens)} tokens, "
                               f"{len(c.logprobs)} log-probs")  # fmt: skip
        if not c.failure and c.version != version:
            raise RolloutError(f"the engine returned row {i} by weight version {c.version} at version {version}")
