"""Checkpoints as one atomic cut: weights, optimiser and position (the trainer's), trajectories and drafter (ours).

The trainer writes `checkpoint-N/`; the others go into the same directory, and the marker file comes last. A directory
without the marker is an interrupted save: it is never resumed from.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import TrainerCallback

from rollout.cache import TrajectoryCache
from rollout.config import CacheConfig
from rollout.types import RolloutError

if TYPE_CHECKING:
    from trainers.drafter import DrafterTrainer
    from trainers.judge_refit import JudgeRefit

MARKER = "specrl.json"


def newest(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    return next((path for path in reversed(_all(directory)) if (path / MARKER).is_file()), None)


_STEP = re.compile(r"checkpoint-(\d+)")


def _all(directory: Path) -> list[Path]:
    """The checkpoints of a run by step, the incomplete ones too."""
    return sorted((path for path in directory.glob("checkpoint-*") if _STEP.fullmatch(path.name)), key=step_of)


def prune(directory: Path, keep: int) -> None:
    """Removes all but the `keep` newest complete checkpoints, and what interrupted saves left before the newest.

    The marker goes first, so that a removal that is interrupted leaves no checkpoint that looks complete.
    """
    found = _all(directory)
    complete = [path for path in found if (path / MARKER).is_file()]
    for path in found:
        if path not in complete[-keep:] and complete and step_of(path) < step_of(complete[-1]):
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
    return checkpoint / "trajectories"


def stage_state(checkpoint: Path) -> dict[str, Any]:
    """The rollout stage's state of a complete checkpoint."""
    return json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))["stage"]


def drafter(checkpoint: Path) -> Path:
    """Where a checkpoint keeps the state of co-training."""
    return checkpoint / "drafter"


def judge(checkpoint: Path) -> Path:
    """Where a checkpoint keeps the state of a judge that is refit."""
    return checkpoint / "judge"


class SaveCache(TrainerCallback):
    """Completes each checkpoint with what else belongs to its step, marks it, and removes the oldest ones.

    Args: cache: trajectories; drafter: co-training; judge: its refits; None where the run has none. state: the rollout
    stage's, for the marker. keep: complete checkpoints.
    """

    def __init__(
        self,
        cache: TrajectoryCache | None,
        config: CacheConfig,
        keep: int,
        state: Callable[[], dict[str, Any]],
        drafter: DrafterTrainer | None = None,
        judge: JudgeRefit | None = None,
    ):
        self._cache, self._config, self._keep, self._stage = cache, config, keep, state
        self._drafter, self._judge = drafter, judge

    def on_save(self, args, state, control, **kwargs) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()  # until every process has written its part, such as its RNG state
        if not state.is_world_process_zero:
            return
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        saved = self._cache is None or self._cache.try_save(
            trajectories(checkpoint), state.global_step, self._config.on_write_error
        )
        if self._cache is not None:
            self._cache.close()
        mark = {"step": state.global_step, "cache": saved, "stage": self._stage()}
        with writing(checkpoint):
            if self._drafter is not None:
                self._drafter.save(drafter(checkpoint))
            if self._judge is not None:
                self._judge.save(judge(checkpoint))
            write_durably(checkpoint / MARKER, json.dumps(mark).encode())
        prune(checkpoint.parent, self._keep)


def write_durably(path: Path, data: bytes) -> None:
    """Replaces a file as a whole: after a crash it is the old one or the new one."""
    draft = path.with_suffix(".tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
