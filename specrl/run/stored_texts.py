"""What a run drafts from, and what it keeps of its responses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrl.config.schema import Config
from specrl.results.records import find_run
from specrl.rollout.cache.log import Twin, open_log
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache, load
from specrl.rollout.receipts import Receipts
from specrl.run import policy
from specrl.run.accuracy import last_texts
from specrl.trainers.checkpoint import Checkpoint
from specrl.trainers.keeping import Keeping

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StoredTexts:
    """Of a run; each is None where the run has no use for it."""

    cache: TrajectoryCache | None
    """The training responses of earlier visits."""
    evaluations: TrajectoryCache | None
    """The responses of the last evaluation."""
    twin: Twin | None
    """The runs whose responses are drafts: itself, if it resumes, and `rollout.twin`."""
    keeping: Keeping
    """The log and the digests that this run writes."""

    @classmethod
    def load(
        cls,
        config: Config,
        run: Path,
        tokenizer: Any,
        model: PreTrainedModel,
        eos_ids: frozenset[int],
        checkpoint: Checkpoint | None,
        data: Mapping[str, str],
    ) -> StoredTexts:
        """What the run resumes with.

        Args:
            run: the run's directory.
            data: digests of the splits of the data set.

        Raises: ConfigError, CacheError.
        """
        identity, sampling = policy.fingerprint(config, tokenizer)
        vocab_size = model.get_output_embeddings().weight.shape[0]
        step = checkpoint.step if checkpoint else 0
        written = None if int(os.environ.get("RANK", 0)) else run  # one process writes the run's directory
        folder = checkpoint.evaluations if checkpoint else None
        cache = load_cache(config, Fingerprint(identity, sampling), vocab_size, eos_ids, checkpoint)
        evaluations = last_texts(config, tokenizer, vocab_size, eos_ids, folder, max_step=step)
        log, twin = open_log(
            run,
            find_run(config.rollout.twin) if config.rollout.twin else None,
            config.rollout.cache,
            Fingerprint(identity | {"seed": str(config.seed)}, sampling),
            writes=written is not None,
        )
        receipts = None
        if not config.rollout.lossy:
            about = {"seed": config.seed, "data": data}
            receipts = Receipts(written, about, step)
        return cls(cache, evaluations, twin, Keeping(log, receipts))


def load_cache(
    config: Config, fingerprint: Fingerprint, vocab_size: int, eos_ids: frozenset[int], checkpoint: Checkpoint | None
) -> TrajectoryCache | None:
    """The trajectory cache from the checkpoint or `rollout.cache.start_from`, else empty; None if nothing is reused.

    Raises: ConfigError, CacheError.
    """
    if not config.rollout.reuses:
        return None
    options = config.rollout.cache
    if not (checkpoint or options.start_from):
        return TrajectoryCache(fingerprint, max_mb=options.max_mb)
    # A checkpoint may have no trajectories, for example after rollout.acceptance=off; the cache is then empty.
    return load(
        checkpoint.trajectories if checkpoint else Path(options.start_from),
        fingerprint,
        vocab_size,
        eos_ids,
        max_step=checkpoint.step if checkpoint else None,
        max_mb=options.max_mb,
        check_sampling=config.rollout.acceptance == "lenient",
        new_run=not checkpoint,
    )
