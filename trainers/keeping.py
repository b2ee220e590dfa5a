"""Keeps the responses of a rollout: in the cache of every process, in the log and in the receipts of the run."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.utils import gather_object

from specrl.rollout.cache.log import ResponseLog
from specrl.rollout.planned import Domain
from specrl.rollout.receipts import Receipts, receipts_of
from specrl.rollout.reduction import Metric
from specrl.rollout.speculative import SpeculativeRollout
from specrl.trainers.scored import Scored


@dataclass(frozen=True)
class Keeping:
    """What a run keeps of its responses besides the cache. The first process writes."""

    log: ResponseLog | None = None
    receipts: Receipts | None = None

    def keep(
        self, sampled: Scored, source: SpeculativeRollout, step: int, number: int, domain: Domain = "rollout"
    ) -> None:
        """Adds the responses of all processes, and charges the time to the batch. Collective.

        Args:
            step: of the trainer.
            number: of the rollout, by which the log and the receipts are numbered.
            domain: training is kept everywhere, an evaluation in its cache alone.
        """
        cache = source.cache if domain == "rollout" else source.evaluations
        log, receipts = (self.log, self.receipts) if domain == "rollout" else (None, None)
        if cache is None and log is None and receipts is None:
            return
        entries = source.entries(sampled.rows, sampled.batch, step=step, rewards=sampled.rewards)
        with sampled.batch.charge_store():
            entries = gather_object(entries)
            if cache is not None:
                cache.merge(entries)
            if log is not None:
                log.add(number, entries)
            if receipts is not None:
                receipts.add(number, gather_object(receipts_of(sampled.rows, sampled.batch)))

    def stats(self, source: SpeculativeRollout) -> dict[str, Metric]:
        """Sizes and losses of the cache, the twin and the log."""
        metrics: dict[str, Metric] = {}
        for part in (source.cache, source.twin, self.log):
            metrics |= part.stats() if part is not None else {}
        return metrics
