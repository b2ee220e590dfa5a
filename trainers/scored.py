"""A rollout with its rewards, and the checks that a rollout must pass before it is scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrl.rollout.types import RolloutBatch, RolloutError, Row


@dataclass
class Scored:
    """Rows that were rolled out: their dataset rows, prompts, responses and rewards.

    Turns of conversations are such rows too, without a dataset row and, as only their conversation has one, a reward.
    """

    inputs: list[dict]
    rows: list[Row]
    batch: RolloutBatch
    rewards: list[float | None]
    """Total rewards, including the overlong penalty; None where the reward or the response failed."""
    unpenalised_rewards: list[float | None]
    """Total rewards without the penalty."""
    turns: Scored | None = None
    """The turns of conversations, each of which is a row here; None where every row has one turn."""

    @classmethod
    def turn(cls, rows: list[Row], batch: RolloutBatch) -> Scored:
        """A turn of some conversations."""
        return cls([], rows, batch, [None] * len(rows), [])

    @property
    def generated(self) -> Scored:
        """What the engine generated for these rows, all turns of conversations."""
        return self.turns or self

    @property
    def tokens(self) -> int:
        """Of its responses."""
        return sum(len(c.tokens) for c in self.batch.completions)

    def __add__(self, later: Scored) -> Scored:
        return Scored(
            inputs=self.inputs + later.inputs,
            rows=self.rows + later.rows,
            batch=self.batch + later.batch,
            rewards=self.rewards + later.rewards,
            unpenalised_rewards=self.unpenalised_rewards + later.unpenalised_rewards,
            turns=self.turns + later.turns if self.turns and later.turns else None,
        )

    def select(self, indices: Sequence[int]) -> Scored:
        """The rows with these indices, in this order, without their turns."""
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
        if not 0 < len(c.tokens) == len(c.logprobs) == len(c.behaviour_logprobs) == len(c.reused):
            raise RolloutError(f"the engine returned a malformed response for row {i}: {len(c.tokens)} tokens, "
                               f"{len(c.logprobs)} log-probs")  # fmt: skip
        if c.version != version:
            raise RolloutError(f"the engine returned row {i} by weight version {c.version} at version {version}")
