"""The `spec/*` and `timing_s/*` metrics of a rollout batch: docs/metrics.md has the formula of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specrl.rollout.reduction import Metric, count, highest, mean, ratio, seconds
from specrl.rollout.types import Completion, RolloutBatch, RolloutError
from specrl.rollout.verify import accept_exact

TOKEN_BYTES = 8  # in a list of token ids, whose integers Python shares


@dataclass
class Divergence:
    """Where responses differ from those of plain decoding with the same keys.

    After its first differing token a row is another text, so each row is compared up to and including that token.
    """

    tokens: int = 0
    """Compared tokens."""
    first: dict[int, int] = field(default_factory=dict)
    """Position of the first differing token, by row."""

    @classmethod
    def of(cls, done: Sequence[Completion], plain: Sequence[Completion]) -> Divergence:
        divergence = cls()
        for i, (a, b) in enumerate(zip(done, plain, strict=True)):
            if a.tokens == b.tokens:
                divergence.tokens += len(a.tokens)
                continue
            divergence.first[i] = accept_exact(a.tokens, b.tokens[: len(a.tokens)])
            divergence.tokens += divergence.first[i] + 1
        return divergence

    def metrics(self) -> dict[str, Metric]:
        flips = len(self.first)
        metrics = {
            "spec/control_mismatches": count(flips),
            "spec/compared_tokens": count(self.tokens),
            "spec/flips_per_1k": mean(1000 * flips, self.tokens),
        }
        if flips:
            metrics["spec/flip_position"] = mean(sum(self.first.values()), flips)
        return metrics


def rollout_metrics(batch: RolloutBatch) -> dict[str, Metric]:
    """The `spec/*` and `timing_s/*` metrics of one batch."""
    stats = batch.stats
    if not batch.completions:
        raise RolloutError("a rollout of no rows has no metrics")
    done = batch.completions
    rows = len(done)
    total = sum(len(c.tokens) for c in done)
    reused = sum(sum(c.reused) for c in done)
    passes = sum(c.passes for c in done)
    ages = [age for age in batch.ages if age is not None]
    metrics = {
        "timing_s/gen": seconds(batch.total_s),
        "timing_s/lookup": seconds(batch.lookup_s),
        "timing_s/store": seconds(batch.store_s),
        "timing_s/prefill": seconds(stats.prefill_s),
        "timing_s/draft": seconds(stats.draft_s),
        "timing_s/verify": seconds(stats.verify_s),
        "timing_s/decode": seconds(stats.decode_s),
        "spec/hit_rate": mean(len(ages), rows),
        "spec/reused_ratio": mean(reused, total),
        "spec/full_reuse_ratio": mean(sum(batch.unchanged), rows),
        "spec/reused_tokens": count(reused),
        "spec/new_tokens": count(total - reused),
        "spec/passes_per_row": mean(passes, rows),
        "spec/passes_max": highest(max(c.passes for c in done)),
        "spec/forward_tokens": count(stats.forward_tokens),
        "spec/ties": count(stats.ties),
        "spec/tried_s": seconds(stats.tried_s),
        "perf/throughput": ratio(count(total), seconds(batch.total_s)),
        "spec/paused_ratio": mean(stats.paused, passes),
    }
    if ages:
        metrics["spec/draft_age"] = mean(sum(ages), len(ages))
    if stats.drafted:
        metrics["spec/draft_acceptance_rate"] = mean(stats.accepted, stats.drafted)
    for name, (drafted, accepted) in stats.sources.items():
        metrics[f"spec/acceptance_{name}"] = mean(accepted, drafted)
        metrics[f"spec/reused_{name}"] = mean(accepted, total)
    if batch.twin:
        metrics["spec/twin_hit_rate"] = mean(sum(same is not None for same in batch.twin), rows)
        metrics["spec/twin_unchanged_ratio"] = mean(sum(same is True for same in batch.twin), rows)
    if batch.ahead:
        metrics |= _ahead_metrics(batch, total)
    if stats.ahead_tokens:
        metrics["spec/ahead_tokens"] = count(stats.ahead_tokens)
    if stats.paused:
        metrics["spec/paused_acceptance"] = mean(stats.paused_acceptance, stats.paused)
        metrics["spec/paused_needed"] = mean(stats.paused_needed, stats.paused)
    return metrics


def _ahead_metrics(batch: RolloutBatch, total: int) -> dict[str, Metric]:
    """What idle workers had rolled out of a batch of `total` tokens ahead of its weights."""
    rows = [(text, c) for text, c in zip(batch.ahead, batch.completions, strict=True) if text]
    ended = [(text, c) for text, c in rows if text.finish]
    unchanged = sum([*text.tokens] == c.tokens for text, c in ended)
    return {
        "timing_s/ahead": count(batch.ahead_s),  # of all workers
        "spec/ahead_ratio": mean(batch.stats.sources.get("ahead", (0, 0))[1], total),
        "spec/ahead_done_ratio": mean(len(ended), len(batch.ahead)),
        "spec/ahead_unchanged_ratio": mean(unchanged, len(batch.ahead)),
        "spec/ahead_mb": count(sum(TOKEN_BYTES * len(text.tokens) for text, _ in rows) / 2**20),
    }


def lossy_metrics(batch: RolloutBatch) -> dict[str, Metric]:
    """What a router or judge did: its steps and faults, and how far its tokens are from the policy's distribution."""
    stats = batch.stats
    divergences = [
        behaviour - policy
        for c in batch.completions
        for behaviour, policy, reused in zip(c.behaviour_logprobs, c.logprobs, c.reused, strict=True)
        if reused
    ]
    metrics = {"spec/route_faults": count(stats.route_faults)}
    if divergences:
        metrics["spec/behaviour_kl"] = mean(sum(divergences), len(divergences))
    if stats.steps:
        metrics["timing_s/route"] = seconds(stats.route_s)
        metrics["spec/route_steps"] = count(stats.steps)
        metrics["spec/escalated_ratio"] = mean(stats.escalated, stats.steps)
    if stats.route_drift:
        metrics["spec/route_drift"] = mean(stats.route_drift, len(divergences))
    if stats.mismatches:
        metrics["spec/judge_drift"] = mean(stats.judge_drift, stats.mismatches)
    return metrics
