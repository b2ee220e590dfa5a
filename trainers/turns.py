"""The metrics of a batch by turns, and what of them TRL logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specrl.rollout.reduction import Metric, mean, seconds
from specrl.trainers.scored import Scored

LOGGED = (
    *("spec/hit_rate", "spec/full_reuse_ratio", "spec/draft_acceptance_rate", "spec/passes_per_row", "timing_s/gen"),
    *("spec/twin_hit_rate", "spec/twin_unchanged_ratio", "cache/twin_left_out", "cache/log_mb", "cache/log_lost"),
    *("spec/plain_s", "spec/speedup", "spec/flips_per_1k"),
    *("spec/ahead_ratio", "spec/ahead_tokens", "spec/ahead_done_ratio", "spec/ahead_unchanged_ratio"),
)
"""Metrics of all turns of a batch that are added to TRL's log (docs/metrics.md)."""


def logged(metrics: Mapping[str, Metric], turns: Sequence[Scored]) -> dict[str, Metric]:
    """Those of a batch's metrics that TRL logs, and for conversations of several turns also those of each turn."""
    kept = {name: value for name, value in metrics.items() if name in LOGGED}
    if not any(c.passes for turn in turns for c in turn.batch.completions):  # vLLM counts passes of all rows together
        kept.pop("spec/passes_per_row")
    accepted = sum(turn.batch.stats.accepted for turn in turns)
    kept["spec/reused_ratio"] = mean(accepted, sum(turn.tokens for turn in turns))
    return kept | (by_turn(turns) if len(turns) > 1 else {})


def by_turn(turns: Sequence[Scored]) -> dict[str, Metric]:
    """How much of each turn was reused, and its seconds."""
    metrics: dict[str, Metric] = {}
    for i, turn in enumerate(turns):
        metrics[f"spec/reused_ratio_turn{i}"] = mean(turn.batch.stats.accepted, turn.tokens)
        metrics[f"timing_s/gen_turn{i}"] = seconds(turn.batch.total_s)
    return metrics
