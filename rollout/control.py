"""Control steps: some rollouts are repeated without reuse, to measure what reuse saves and what it costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from specrl.rollout.metrics import Divergence, lossy_metrics, rollout_metrics
from specrl.rollout.reduction import Metric, ratio, seconds, shared
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import RolloutBatch, RolloutError, Row

Score = Callable[[Sequence[Row], Sequence[list[int]]], list[float | None]]
"""Total reward of each response given as token ids; None where the reward failed."""
Exchange = Callable[[list], list]
"""Turns a list of this process into that of all processes; collective."""


class Control:
    """The metrics of rollouts. Every `measure_every`-th rollout is repeated by plain decoding with the same keys, and,
    if keys are replayed, with fresh keys.

    Args:
        rollout: measured here.
        score: rewards of control rows, for the reuse gap; needed if keys are replayed.
        exchange: gathers over processes; `list` for one process.
        strict: raise when a response differs from plain decoding (float32 on a CPU).
    """

    def __init__(self, rollout: SpeculativeRollout, score: Score, exchange: Exchange = list, *, strict: bool):
        self._rollout = rollout
        self._score = score
        self._exchange = exchange
        self._strict = strict
        self.rollouts = 0
        """Observed so far; a resumed run continues the count."""

    @property
    def measured(self) -> bool:
        """True between a control step and the next rollout."""
        every = self._rollout.config.measure_every
        return bool(every and self.rollouts and self.rollouts % every == 0)

    @property
    def due(self) -> bool:
        """True before the rollout of a control step is observed."""
        every = self._rollout.config.measure_every
        return bool(every and (self.rollouts + 1) % every == 0)

    def __call__(
        self, rows: Sequence[Row], batch: RolloutBatch, rewards: Sequence[float | None], *, step: int
    ) -> dict[str, Metric]:
        """The metrics of a stored batch.

        Raises:
            RolloutError: `strict`, and a response differs.
        """
        config = self._rollout.config
        metrics = rollout_metrics(batch)
        if config.acceptance in ("judged", "routed"):
            metrics |= lossy_metrics(batch)
        self.rollouts += 1
        if self.measured and config.acceptance == "exact":
            metrics |= self._plain(rows, batch)
            if config.replay:
                metrics |= self._reuse_gap(rows, batch, rewards, step)
        return metrics

    def _plain(self, rows: Sequence[Row], batch: RolloutBatch) -> dict[str, Metric]:
        """The same rows by plain decoding with the same keys, timed and compared token for token."""
        ends = [0, *accumulate(batch.calls or [len(rows)])]  # in the same calls, as rows of one call share passes
        # with dynamic sampling a process may have had no row in a call
        calls = [slice(first, end) for first, end in pairwise(ends) if first < end]
        plain, *later = [self._rollout.plain(rows[call], batch.keys[call]) for call in calls]
        plain = sum(later, plain)
        divergence = Divergence.of(batch.completions, plain.completions)
        if self._strict:
            refuse_divergence(divergence, rows, batch)
        plain_s = seconds(plain.total_s)
        return {
            "spec/plain_s": plain_s,
            "spec/speedup": ratio(plain_s, seconds(batch.total_s)),
            "timing_s/control": plain_s,
            **divergence.metrics(),
        }

    def _reuse_gap(self, rows, batch: RolloutBatch, rewards, step: int) -> dict[str, Metric]:
        """Mean reward of replayed rows minus that of fresh rows of the same prompts and samples (docs/guarantees.md).

        Only pairs count in which both rows have a reward.
        """
        scored = zip(batch.replayed, rewards, strict=True)
        chosen = [i for i, (replayed, reward) in enumerate(scored) if replayed and reward is not None]
        by_prompt: defaultdict[str, list[float]] = defaultdict(list)
        metrics: dict[str, Metric] = {}
        if chosen:
            control = self._rollout.generate(
                [rows[i] for i in chosen],
                visit=[batch.visits[i] for i in chosen],
                step=step,
                sample_indices=[batch.sample_indices[i] for i in chosen],
                domain="control",
            )
            metrics = {"timing_s/reuse_gap": seconds(control.total_s)}
            fresh = self._score([rows[i] for i in chosen], [c.tokens for c in control.completions])
            for i, score in zip(chosen, fresh, strict=True):
                if score is not None:
                    by_prompt[rows[i].example_id].append(rewards[i] - score)
        clusters = self._exchange([(len(differences), sum(differences)) for differences in by_prompt.values()])
        gap, error = reuse_gap(clusters)
        if clusters:
            metrics |= {"spec/reuse_gap": shared(gap), "spec/reuse_gap_error": shared(error)}
        return metrics


def refuse_divergence(divergence: Divergence, rows: Sequence[Row], batch: RolloutBatch) -> None:
    """Raises RolloutError if a response differs from that of plain decoding with the same key."""
    if divergence.first:
        i, position = next(iter(divergence.first.items()))
        raise RolloutError(
            f"{len(divergence.first)} of {len(rows)} speculative responses differ from plain decoding with the "
            f"same keys (first: example {rows[i].example_id!r}, sample {batch.sample_indices[i]}, from token "
            f"{position} on). This must not happen in float32 on a CPU; please report it with the "
            "output of `python -m specrl.env`"
        )


def reuse_gap(clusters: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Mean reward of replayed rows minus that of fresh rows of the same prompts and samples, and its standard error.

    A cluster is a prompt on one control step: its replayed rows, and the sum of the differences of their rewards. A
    ratio estimate over c clusters of n rows with summed difference d: gap = sum(d) / sum(n), with variance
    c / (c - 1) * sum((d - gap * n)^2) / sum(n)^2. Rows of one prompt are correlated; prompts are independent.

    Returns: NaN and infinity without rows, an infinite error with a single cluster.
    """
    rows = sum(n for n, _ in clusters)
    if not rows:
        return math.nan, math.inf
    gap = sum(d for _, d in clusters) / rows
    count = len(clusters)
    if count == 1:
        return gap, math.inf
    squares = sum((d - gap * n) ** 2 for n, d in clusters)
    return gap, math.sqrt(count / (count - 1) * squares) / rows
