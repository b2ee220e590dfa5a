"""Control steps: now and then a rollout is repeated without reuse, to measure what reuse saves and what it costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from specrl.rollout.metrics import Divergence, lossy_metrics, rollout_metrics
from specrl.rollout.reduction import Metric, count, difference, ratio, seconds, shared
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import RolloutBatch, RolloutError, Row

Score = Callable[[Sequence[Row], Sequence[list[int]]], list[float | None]]
"""Total reward of each response given as token ids; None where the reward failed."""
Exchange = Callable[[list], list]
"""Turns a list of this process into that of all processes; collective."""


class Control:
    """The metrics of rollouts, and of every `measure_every`-th one's repetition: by plain decoding with the same keys,
    and, where keys are replayed, with fresh ones.

    Args:
        rollout: what is measured.
        score: rewards of control rows, for the reuse gap; needed when something is replayed.
        exchange: `list` for one process.
        strict: raise when a response differs from plain decoding (float32 on a CPU).
    """

    def __init__(self, rollout: SpeculativeRollout, score: Score, exchange: Exchange = list, *, strict: bool):
        self._rollout, self._score, self._exchange, self._strict = rollout, score, exchange, strict
        self._plain_s_per_token: float | None = None
        self._lost = 0
        """Control rows of the last control step that have no response."""
        self.rollouts = 0
        """That were looked at; a resumed run goes on counting."""

    @property
    def measured(self) -> bool:
        """True from a control step on until the next rollout."""
        every = self._rollout.config.measure_every
        return bool(every and self.rollouts and self.rollouts % every == 0)

    def __call__(
        self, rows: Sequence[Row], batch: RolloutBatch, rewards: Sequence[float | None], *, step: int
    ) -> dict[str, Metric]:
        """The metrics of a stored batch.

        Raises:
            RolloutError: no row has a response, or `strict` and one differs.
        """
        config, metrics = self._rollout.config, rollout_metrics(batch)
        if config.acceptance in ("judged", "routed"):
            metrics |= lossy_metrics(batch)
        self.rollouts += 1
        if self.measured:
            self._lost = 0
            if config.acceptance == "exact":
                metrics |= self._plain(rows, batch)
                if config.replay:
                    metrics |= self._reuse_gap(rows, batch, rewards, step)
            metrics["control/failed_rows"] = count(self._lost)
        if self._plain_s_per_token is not None:
            plain_s = self._plain_s_per_token * sum(len(c.tokens) for c in batch.completions)
            metrics["spec/saved_s_est"] = difference(seconds(plain_s), seconds(batch.total_s))
        return metrics

    def _plain(self, rows: Sequence[Row], batch: RolloutBatch) -> dict[str, Metric]:
        """The same rows by plain decoding with the same keys, timed and compared token for token.

        Where a row of any process failed on either side the two did not do the same work: there are no times to
        compare.
        """
        ends = [0, *accumulate(batch.calls or [len(rows)])]  # in the same calls, as the rows of one share passes
        # with dynamic sampling a process may have had no row in a call
        calls = [slice(first, end) for first, end in pairwise(ends) if first < end]
        plain, *later = [self._rollout.plain(rows[call], batch.keys[call]) for call in calls]
        plain = sum(later, plain)
        parted = Divergence.of(batch.completions, plain.completions)
        if parted.first and self._strict:
            i, position = next(iter(parted.first.items()))
            raise RolloutError(
                f"{len(parted.first)} of {len(rows)} speculative responses differ from plain decoding with the same "
                f"keys (first: example {rows[i].example_id!r}, sample {batch.sample_indices[i]}, from token "
                f"{position} on). This must not happen in float32 on a CPU; please report it with the "
                "output of `python -m specrl.env`"
            )
        spent = {"timing_s/control": seconds(plain.total_s), **parted.metrics()}
        self._lost += sum(bool(c.failure) for c in plain.completions)
        failed = any(c.failure for c in (*batch.completions, *plain.completions))
        if any(self._exchange([failed])):
            return spent
        self._plain_s_per_token = plain.total_s / max(1, sum(len(c.tokens) for c in plain.completions))
        plain_s = seconds(plain.total_s)
        return {"spec/plain_s": plain_s, "spec/speedup": ratio(plain_s, seconds(batch.total_s)), **spent}

    def _reuse_gap(self, rows, batch: RolloutBatch, rewards, step: int) -> dict[str, Metric]:
        """Mean reward of replayed rows minus that of fresh rows of the same prompts and samples (docs/guarantees.md).

        Only pairs of which both have a response and a reward count.
        """
        scored = zip(batch.replayed, rewards, strict=True)
        chosen = [i for i, (replayed, reward) in enumerate(scored) if replayed and reward is not None]
        by_prompt, spent = defaultdict(list), {}
        if chosen:
            twins, sample_indices, visits = (
                [column[i] for i in chosen] for column in (rows, batch.sample_indices, batch.visits)
            )
            control = self._rollout.generate(
                twins, visit=visits, step=step, sample_indices=sample_indices, domain="control"
            )
            spent = {"timing_s/reuse_gap": seconds(control.total_s)}
            done = [(i, c.tokens) for i, c in zip(chosen, control.completions, strict=True) if not c.failure]
            self._lost += len(chosen) - len(done)
            fresh = self._score([rows[i] for i, _ in done], [tokens for _, tokens in done]) if done else []
            for (i, _), score in zip(done, fresh, strict=True):
                if score is not None:
                    by_prompt[rows[i].example_id].append(rewards[i] - score)
        from specrl.rollout.replay import reuse_gap

        clusters = self._exchange([(len(apart), sum(apart)) for apart in by_prompt.values()])
        gap, error = reuse_gap(clusters)
        if clusters:
            spent |= {"spec/reuse_gap": shared(gap), "spec/reuse_gap_error": shared(error)}
        return spent
