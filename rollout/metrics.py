"""The `spec/*` and `timing_s/*` metrics of a rollout batch: docs/metrics.md has the formula of each."""

from __future__ import annotations

from rollout.types import RolloutBatch, RolloutError


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """The `spec/*` and `timing_s/*` metrics of one batch."""
    stats, done = batch.stats, [c for c in batch.completions if not c.failure]
    if not done:
        raise RolloutError(f"no row of the rollout has a response; the first says: {batch.completions[0].failure}")
    total = sum(len(c.tokens) for c in done)
    reused = sum(sum(c.reused) for c in done)
    ages = [age for age in batch.ages if age is not None]
    metrics = {
        "timing_s/gen": batch.total_s,
        "timing_s/lookup": batch.lookup_s,
        "timing_s/store": batch.store_s,
        "timing_s/prefill": stats.prefill_s,
        "timing_s/draft": stats.draft_s,
        "timing_s/verify": stats.verify_s,
        "timing_s/decode": stats.decode_s,
        "rollout/failed_rows": len(batch.completions) - len(done),
        "spec/hit_rate": len(ages) / len(batch.completions),
        "spec/reused_ratio": reused / total,
        "spec/full_reuse_ratio": sum(batch.unchanged) / len(batch.completions),
        "spec/reused_tokens": reused,
        "spec/new_tokens": total - reused,
        "spec/passes_per_row": sum(c.passes for c in done) / len(done),
        "spec/passes_max": max(c.passes for c in done),
        "spec/forward_tokens": stats.forward_tokens,
        "spec/ties": stats.ties,
        "perf/throughput": total / batch.total_s,
    }
    if ages:
        metrics["spec/draft_age"] = sum(ages) / len(ages)
    if stats.drafted:
        metrics["spec/draft_acceptance_rate"] = stats.accepted / stats.drafted
    for name, (drafted, accepted) in stats.sources.items():
        metrics[f"spec/acceptance_{name}"] = accepted / drafted
        metrics[f"spec/reused_{name}"] = accepted / total
    if stats.forks:
        metrics["spec/branch_cover"] = stats.fork_mass / stats.forks
    metrics["spec/paused_ratio"] = stats.paused / max(1, sum(c.passes for c in done))
    if stats.paused:
        metrics["spec/paused_acceptance"] = stats.paused_acceptance / stats.paused
        metrics["spec/paused_needed"] = stats.paused_needed / stats.paused
    if stats.steps:
        metrics["timing_s/route"] = stats.route_s
        metrics["spec/route_steps"] = stats.steps
        metrics["spec/escalated_ratio"] = stats.escalated / stats.steps
    return metrics


def lossy_metrics(batch: RolloutBatch) -> dict[str, float]:
    """How far the text that a router or judge let stand is from the policy's, and how often they failed."""
    drafted = [
        behaviour - own
        for c in batch.completions
        for behaviour, own, reused in zip(c.behaviour_logprobs, c.logprobs, c.reused, strict=True)
        if reused
    ]
    metrics: dict[str, float] = {"spec/route_faults": batch.stats.route_faults}
    if drafted:
        metrics["spec/behaviour_kl"] = sum(drafted) / len(drafted)
    return metrics
