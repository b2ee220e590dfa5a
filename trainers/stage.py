"""The rollout stage of a trainer step: generate, store, measure. It knows no trainer library: all algorithms use it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from rollout.replay import reuse_gap
from rollout.speculative import SpeculativeRollout
from rollout.types import RolloutBatch, RolloutError, Row
from rollout.visits import Visits

Score = Callable[[Sequence[Row], Sequence[list[int]]], list[float | None]]
"""Total reward of each response given as token ids; None where the reward failed."""


class RolloutStage:
    """Runs SpeculativeRollout once per trainer step, with control steps that measure what it saves and what it costs.

    Args:
        rollout: the accelerator.
        score: rewards of control rows, for the reuse gap; needed when something is replayed.
        strict: raise when a control step finds a response that differs from plain decoding (float32 on a CPU).
        exchange: turns a list of this process into that of all processes (identity for one process).
    """

    def __init__(
        self,
        rollout: SpeculativeRollout,
        score: Score,
        *,
        strict: bool,
        exchange: Callable[[list], list] = lambda entries: entries,
    ):
        self.rollout, self._score, self._strict, self._exchange = rollout, score, strict, exchange
        self._plain_s_per_token: float | None = None
        self._rollouts, self._visits = 0, Visits()

    def generate(self, rows: Sequence[Row], *, step: int, slots: Sequence[int]) -> RolloutBatch:
        """See SpeculativeRollout.generate. The call is one visit to each of its prompts."""
        return self.rollout.generate(rows, visit=self._count(rows), step=step, slots=slots)

    def _count(self, rows: Sequence[Row]) -> list[int]:
        """How often the prompt of each row was rolled out before, by any process."""
        asked = self._exchange([row.example_id for row in rows])
        seen = dict(zip(asked, self._visits.next(asked), strict=True))
        self.rollout.replay.until(max(seen.values()))  # in step in all processes, whichever has the latest visit
        return [seen[row.example_id] for row in rows]

    def finish(
        self, rows: Sequence[Row], batch: RolloutBatch, rewards: Sequence[float | None], *, step: int
    ) -> dict[str, float]:
        """Stores the batch, runs the control rows that are due, and returns the step's metrics."""
        if self.rollout.cache is not None:
            entries = self.rollout.entries(rows, batch, step=step, rewards=rewards)
            with batch.charge_store():
                self.rollout.cache.merge(self._exchange(entries))
        metrics = rollout_metrics(batch)
        config = self.rollout.config
        if config.law in ("judged", "routed"):
            metrics |= lossy_metrics(batch)
        self._rollouts += 1
        if self.measured:
            if config.law == "exact":
                metrics |= self._control(rows, batch)
            # the baseline of an `auto` run measures too, as its keys follow from what is measured
            if config.replay and (config.law == "exact" or config.replay == "auto"):
                metrics |= self._reuse_gap(rows, batch, rewards, step=step)
        if config.replay:
            shares = self.rollout.replay.until(max(batch.visits))
            metrics["spec/replay_share"] = sum(shares[visit] for visit in batch.visits) / len(batch.visits)
        if self._plain_s_per_token is not None:
            plain_s = self._plain_s_per_token * sum(len(c.tokens) for c in batch.completions)
            metrics["spec/saved_s_est"] = plain_s - batch.total_s
        if self.rollout.cache is not None:
            metrics |= self.rollout.cache.stats()
        return metrics

    @property
    def measured(self) -> bool:
        """True from `finish` of a control step on, until the next step's."""
        every = self.rollout.config.measure_every
        return bool(every and self._rollouts and self._rollouts % every == 0)

    def _control(self, rows: Sequence[Row], batch: RolloutBatch) -> dict[str, float]:
        """The same rows by plain decoding with the same keys, timed and compared token for token."""
        ends = [0, *accumulate(batch.calls or [len(rows)])]  # in the same calls, as the rows of one share passes
        # with dynamic sampling a process may have had no row in a call
        calls = [slice(first, end) for first, end in pairwise(ends) if first < end]
        plain, *later = [self.rollout.plain(rows[call], batch.keys[call]) for call in calls]
        plain = sum(later, plain)
        differing = [
            i for i, (a, b) in enumerate(zip(batch.completions, plain.completions, strict=True)) if a.tokens != b.tokens
        ]
        if differing and self._strict:
            row = rows[differing[0]]
            raise RolloutError(
                f"{len(differing)} of {len(rows)} speculative responses differ from plain decoding with the same keys "
                f"(first: example {row.example_id!r}, slot {batch.slots[differing[0]]}). This must not happen in "
                "float32 on a CPU; please report it with the output of `python -m specrl.env`"
            )
        self._plain_s_per_token = plain.total_s / max(1, sum(len(c.tokens) for c in plain.completions))
        return {
            "timing_s/control": plain.total_s,
            "spec/plain_s": plain.total_s,
            "spec/speedup": plain.total_s / batch.total_s,
            "spec/control_mismatches": len(differing),
        }

    def _reuse_gap(self, rows, batch: RolloutBatch, rewards, *, step: int) -> dict[str, float]:
        """Mean reward of replayed rows minus that of fresh rows of the same prompts and slots (docs/guarantees.md)."""
        chosen = [
            i for i, (replayed, r) in enumerate(zip(batch.replayed, rewards, strict=True)) if replayed and r is not None
        ]
        by_prompt, spent = defaultdict(list), 0.0
        if chosen:
            control_rows, slots = [rows[i] for i in chosen], [batch.slots[i] for i in chosen]
            visits = [batch.visits[i] for i in chosen]
            control = self.rollout.generate(control_rows, visit=visits, step=step, slots=slots, domain="control")
            spent = control.total_s
            scores = self._score(control_rows, [c.tokens for c in control.completions])
            for i, score in zip(chosen, scores, strict=True):
                if score is not None:
                    by_prompt[rows[i].example_id].append(rewards[i] - score)
        clusters = self._exchange([(len(found), sum(found)) for found in by_prompt.values()])
        self.rollout.replay.observe(clusters)
        gap, error = reuse_gap(clusters)
        measured = {"spec/reuse_gap": gap, "spec/reuse_gap_error": error} if clusters else {}
        return measured | ({"timing_s/reuse_gap": spent} if chosen else {})

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to measure at the same steps and to derive the same keys, as JSON types."""
        return {
            "rollouts": self._rollouts,
            "replay": self.rollout.replay.state(),
            "visits": self._visits.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from `state` of a checkpoint."""
        self._rollouts = state["rollouts"]
        self.rollout.replay.restore(state["replay"])
        self._visits = Visits(state["visits"])


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
