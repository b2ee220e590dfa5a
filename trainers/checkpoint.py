"""Checkpoints as one atomic cut: weights, optimiser, RNG and data position (TRL), the trajectory cache (ours).

TRL writes `checkpoint-N/`; the cache goes into the same directory, and the marker file comes last. A directory without
the marker is an interrupted save: it is never resumed from.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from transformers import TrainerCallback

from rollout.cache import TrajectoryCache
from rollout.config import CacheConfig

MARKER = "specrl.json"


def newest(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    found = [(int(match[1]), path) for path in directory.glob("checkpoint-*") if (match := _STEP.fullmatch(path.name))]
    return next((path for _, path in sorted(found, reverse=True) if (path / MARKER).is_file()), None)


_STEP = re.compile(r"checkpoint-(\d+)")


def step_of(checkpoint: Path) -> int:
    """The optimiser step a checkpoint was taken after."""
    return int(_STEP.fullmatch(checkpoint.name)[1])


def trajectories(checkpoint: Path) -> Path:
    """Where a checkpoint keeps its trajectory cache."""
    return checkpoint / "trajectories"


class SaveCache(TrainerCallback):
    """Completes each checkpoint with the trajectory cache of the same step, then marks it."""

    def __init__(self, cache: TrajectoryCache | None, config: CacheConfig):
        self._cache, self._config = cache, config

    def on_save(self, args, state, control, **kwargs) -> None:
        if not state.is_world_process_zero:
            return
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        saved = self._cache is None or self._cache.try_save(
            trajectories(checkpoint), state.global_step, self._config.on_write_error
        )
        if self._cache is not None:
            self._cache.close()
        _write_durably(checkpoint / MARKER, json.dumps({"step": state.global_step, "cache": saved}))


def _write_durably(path: Path, text: str) -> None:
    draft = path.with_suffix(".tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
