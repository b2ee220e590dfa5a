"""The turns of a batch: their cache entries, their metrics, and under TRL the same turns again without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrl.rollout.control import refuse_divergence
from specrl.rollout.metrics import Divergence, rollout_metrics
from specrl.rollout.reduction import Metric, mean, ratio, seconds
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import RolloutBatch, Row, Trajectory

LOGGED = (
    *("spec/hit_rate", "spec/full_reuse_ratio", "spec/draft_acceptance_rate", "spec/passes_per_row", "timing_s/gen"),
    *("spec/twin_hit_rate", "spec/twin_unchanged_ratio"),
)
"""Metrics of all turns of a batch that are added to TRL's log (docs/metrics.md)."""


@dataclass
class Turn:
    """One turn of a batch of conversations in this process."""

    rows: list[Row]
    batch: RolloutBatch
    step: int
    training: bool

    @property
    def tokens(self) -> int:
        """Of its responses."""
        return sum(len(c.tokens) for c in self.batch.completions)

    def entries(self, rollout: SpeculativeRollout) -> list[tuple[str, int, Trajectory]]:
        """What the next visit drafts from."""
        return rollout.entries(self.rows, self.batch, step=self.step)


def turn_metrics(turns: Sequence[Turn]) -> dict[str, Metric]:
    """The metrics of a batch, and for conversations of several turns also those of each turn."""
    first, *later = turns
    everything = sum((turn.batch for turn in later), first.batch)
    metrics = {name: value for name, value in rollout_metrics(everything).items() if name in LOGGED}
    if not any(c.passes for c in everything.completions):  # vLLM counts passes of all rows together
        metrics.pop("spec/passes_per_row")
    metrics["spec/reused_ratio"] = mean(everything.stats.accepted, sum(turn.tokens for turn in turns))
    return metrics | (by_turn(turns) if later else {})


def by_turn(turns: Sequence[Turn]) -> dict[str, Metric]:
    """How much of each turn was reused, and its seconds."""
    metrics: dict[str, Metric] = {}
    for i, turn in enumerate(turns):
        metrics[f"spec/reused_ratio_turn{i}"] = mean(turn.batch.stats.accepted, turn.tokens)
        metrics[f"timing_s/gen_turn{i}"] = seconds(turn.batch.total_s)
    return metrics


def control_metrics(rollout: SpeculativeRollout, turns: Sequence[Turn], *, strict: bool) -> dict[str, Metric]:
    """Repeats all turns without drafts under the same keys, and measures what drafts saved.

    Each turn has its recorded prompt, tool results included, so no tool runs again.

    Args:
        strict: raise when a response differs from plain decoding (float32 on a CPU).
    """
    metrics: dict[str, Metric] = {}
    spent, plain_spent = 0.0, 0.0
    mismatches, compared = 0, 0
    for i, turn in enumerate(turns):
        if not turn.rows:
            continue
        plain = rollout.plain(turn.rows, turn.batch.keys)
        divergence = Divergence.of(turn.batch.completions, plain.completions)
        if strict:
            refuse_divergence(divergence, turn.rows, turn.batch)
        mismatches += len(divergence.first)
        compared += divergence.tokens
        spent += turn.batch.total_s
        plain_spent += plain.total_s
        if len(turns) > 1:
            speedup = ratio(seconds(plain.total_s), seconds(turn.batch.total_s))
            metrics |= {f"spec/plain_s_turn{i}": seconds(plain.total_s), f"spec/speedup_turn{i}": speedup}
    metrics |= {
        "spec/plain_s": seconds(plain_spent),
        "spec/saved_s": Metric([("seconds", plain_spent), ("seconds", spent)], _difference),
        "spec/speedup": ratio(seconds(plain_spent), seconds(spent)),
        "spec/flips_per_1k": mean(1000 * mismatches, compared),
    }
    return metrics


def _difference(plain: float, spent: float) -> float:
    return plain - spent
