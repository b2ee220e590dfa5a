"""Keeps the responses of a rollout: in the cache of every process, and in the log and the receipts of the run."""

from __future__ import annotations

from accelerate.utils import gather_object

from specrl.rollout.cache.log import ResponseLog
from specrl.rollout.receipts import Receipts, receipts_of
from specrl.rollout.speculative import SpeculativeRollout
from specrl.trainers.scored import Generated


def keep(
    sampled: Generated, source: SpeculativeRollout, log: ResponseLog | None, receipts: Receipts | None, step: int
) -> None:
    """Adds the responses of all processes, and charges the time to the batch. Collective.

    Args: log, receipts: write in the first process.
    """
    if source.cache is None and log is None and receipts is None:
        return
    entries = source.entries(sampled.rows, sampled.batch, step=step, rewards=sampled.rewards)
    with sampled.batch.charge_store():
        entries = gather_object(entries)
        rows = gather_object(receipts_of(sampled.rows, sampled.batch)) if receipts is not None else []
        if source.cache is not None:
            source.cache.merge(entries)
        if log is not None:
            log.add(step, entries)
        if receipts is not None:
            receipts.add(step, rows)
