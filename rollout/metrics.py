"""The `spec/*` and `timing_s/*` metrics of a rollout batch: docs/metrics.md has the formula of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specrl.rollout.reduction import Metric, count, highest, mean, ratio, seconds
from specrl.rollout.types import Completion, RolloutBatch, RolloutError

TOKEN_BYTES = 8  # of a list of token ids, which Python shares


@dataclass
class Divergence:
    """Where responses leave those that plain decoding gives the same rows with the same keys.

    Behind its first differing token a row is another text, so each row is compared up to and including that one. Rows
    that failed on either side are not compared.
    """

    tokens: int = 0
    """That were compared."""
    first: dict[int, int] = field(default_factory=dict)
    """Position of the first differing token, by row."""

    @classmethod
    def of(cls, done: Sequence[Completion], plain: Sequence[Completion]) -> Divergence:
        found = cls()
        for i, (a, b) in enumerate(zip(done, plain, strict=True)):
            if a.failure or b.failure:
                continue
            if a.tokens == b.tokens:
                found.tokens += len(a.tokens)
                continue
            both = enumerate(zip(a.tokens, b.tokens, strict=False))
            ends = min(len(a.tokens), len(b.tokens))  # where one goes on behind the other's end
            found.first[i] = next((t for t, (x, y) in both if x != y), ends)
            found.tokens += found.first[i] + 1
        return found

    def metrics(self) -> dict[str, Metric]:
        flips = len(self.first)
        found = {
            "spec/control_mismatches": count(flips),
            "spec/compared_tokens": count(self.tokens),
            "spec/flips_per_1k": mean(1000 * flips, self.tokens),
        }
        if flips:
            found["spec/flip_position"] = mean(sum(self.first.values()), flips)
        return found


def rollout_metrics(batch: RolloutBatch) -> dict[str, Metric]:
    """The `spec/*` and `timing_s/*` metrics of one batch."""
    stats, done = batch.stats, [c for c in batch.completions if not c.failure]
    if not done:
        raise RolloutError(f"no row of the rollout has a response; the first says: {batch.completions[0].failure}")
    rows = len(batch.completions)
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
        "rollout/failed_rows": count(rows - len(done)),
        "spec/hit_rate": mean(len(ages), rows),
        "spec/reused_ratio": mean(reused, total),
        "spec/full_reuse_ratio": mean(sum(batch.unchanged), rows),
        "spec/reused_tokens": count(reused),
        "spec/new_tokens": count(total - reused),
        "spec/passes_per_row": mean(passes, len(done)),
        "spec/passes_max": highest(max(c.passes for c in done)),
        "spec/forward_tokens": count(stats.forward_tokens),
        "spec/ties": count(stats.ties),
        "perf/throughput": ratio(count(total), seconds(batch.total_s)),
        "spec/paused_ratio": mean(stats.paused, passes),
    }
    if ages:
        metrics["spec/draft_age"] = mean(sum(ages), len(ages))
    if stats.drafter_faults:
        metrics["spec/drafter_faults"] = count(stats.drafter_faults)
    if stats.drafted:
        metrics["spec/draft_acceptance_rate"] = mean(stats.accepted, stats.drafted)
    for name, (drafted, accepted) in stats.sources.items():
        metrics[f"spec/acceptance_{name}"] = mean(accepted, drafted)
        metrics[f"spec/reused_{name}"] = mean(accepted, total)
    if batch.ahead:
        metrics |= _ahead_metrics(batch, total)
    if stats.paused:
        metrics["spec/paused_acceptance"] = mean(stats.paused_acceptance, stats.paused)
        metrics["spec/paused_needed"] = mean(stats.paused_needed, stats.paused)
    if stats.steps:
        metrics["timing_s/route"] = seconds(stats.route_s)
        metrics["spec/route_steps"] = count(stats.steps)
        metrics["spec/escalated_ratio"] = mean(stats.escalated, stats.steps)
    return metrics


def _ahead_metrics(batch: RolloutBatch, total: int) -> dict[str, Metric]:
    """What idle workers had rolled out of a batch of `total` tokens before its weights were there."""
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
    """How far the text that a router or judge let stand is from the policy's, and how often they failed."""
    drafted = [
        behaviour - own
        for c in batch.completions
        for behaviour, own, reused in zip(c.behaviour_logprobs, c.logprobs, c.reused, strict=True)
        if reused
    ]
    metrics = {"spec/route_faults": count(batch.stats.route_faults)}
    if drafted:
        metrics["spec/behaviour_kl"] = mean(sum(drafted), len(drafted))
    return metrics
