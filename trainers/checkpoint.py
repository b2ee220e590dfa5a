"""Checkpoints as one atomic cut: weights, optimiser and position (the trainer's), trajectories and companions (ours).

The trainer writes `checkpoint-N/`; the others go into the same directory. When all of it is on the disk the marker
file follows, with the size and digest of every file. A directory without the marker is an interrupted save, one whose
files are not those of its marker is damaged; neither is ever resumed from.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import TrainerCallback

from specrl.rollout.durable import write_durably
from specrl.rollout.types import RolloutError
from specrl.trainers.manifest import seal

if TYPE_CHECKING:
    from specrl.trainers.rollouts import Rollouts

MARKER = "specrl.json"
_STEP = re.compile(r"checkpoint-(\d+)")
CACHE = "trajectories"


def marked(directory: Path) -> list[Path]:
    """The checkpoints of a run whose save came to its end, by step; their files are not looked at."""
    return [path for path in _all(directory) if (path / MARKER).is_file()]


def _all(directory: Path) -> list[Path]:
    """The checkpoints of a run by step, the incomplete ones too."""
    return sorted((path for path in directory.glob("checkpoint-*") if _STEP.fullmatch(path.name)), key=step_of)


def prune(directory: Path, saved: Path, keep: int) -> None:
    """Removes what lies before `saved`, which was just completed, but for the `keep` - 1 newest complete checkpoints.

    The marker goes first, so that a removal that is interrupted leaves no checkpoint that looks complete.
    """
    earlier = [path for path in _all(directory) if step_of(path) < step_of(saved)]
    complete = [path for path in earlier if (path / MARKER).is_file()]
    kept = complete[max(0, len(complete) - keep + 1) :]
    for path in earlier:
        if path not in kept:
            (path / MARKER).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def step_of(checkpoint: Path) -> int:
    """The optimiser step a checkpoint was taken after."""
    return int(_STEP.fullmatch(checkpoint.name)[1])


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what a full or failing disk raises while `path` is written into one line; torch raises bare RuntimeErrors.

    Raises: RolloutError.
    """
    try:
        yield
    except RolloutError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        raise RolloutError(
            f"{path} cannot be written: {error}. Free some space or lower trainer.keep_checkpoints; resume=auto then "
            "goes on from the newest complete checkpoint"
        ) from error


def trajectories(checkpoint: Path) -> Path:
    """Where a checkpoint keeps its trajectory cache."""
    return checkpoint / CACHE


def digest_of(mark: dict[str, Any]) -> str:
    """What a marker's content is sealed with."""
    return blake2b(json.dumps(mark).encode(), digest_size=16).hexdigest()


class SaveCache(TrainerCallback):
    """Completes each checkpoint with what else belongs to its step, marks it, and removes the oldest ones.

    Args: rollouts: of the run; keep: complete checkpoints; data: digests of the data's splits, for the marker.
    """

    def __init__(self, rollouts: Rollouts, keep: int, data: Mapping[str, str]):
        self._rollouts, self._keep, self._data = rollouts, keep, dict(data)
        self._spent_s: float | None = None

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs) -> None:
        """Puts the seconds that the cache took at the last save into the next record: a save follows its step's."""
        if logs and "loss" in logs and self._spent_s is not None:
            logs["timing_s/cache_save"], self._spent_s = self._spent_s, None

    def on_save(self, args, state, control, **kwargs) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()  # until every process has written its part, such as its RNG state
        if not state.is_world_process_zero:
            return
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self._save_cache(checkpoint, state.global_step)
        mark = {"step": state.global_step, "rollouts": self._rollouts.state(), "data": self._data}
        with writing(checkpoint):
            for name, companion in self._rollouts.companions.items():
                companion.save(checkpoint / name)
            mark = json.loads(json.dumps(mark | {"files": seal(checkpoint, MARKER)}))  # as it will be read
            write_durably(checkpoint / MARKER, json.dumps(mark | {"digest": digest_of(mark)}).encode())
        prune(checkpoint.parent, checkpoint, self._keep)

    def _save_cache(self, checkpoint: Path, step: int) -> None:
        source = self._rollouts.source
        if source.cache is None:
            return
        began = time.perf_counter()
        source.cache.save(trajectories(checkpoint), step, source.config.cache.on_write_error)
        self._spent_s = time.perf_counter() - began
