"""Checkpoints of a run: weights, optimiser and progress, trajectories, and the drafter in training.

The trainer writes `checkpoint-N/`; trajectories and drafter are added to the same directory. Once all files are on
disk, a marker file is written with the size and digest of each. A directory without a marker is an interrupted save;
one whose files differ from its marker is damaged. A run never resumes from either.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import TrainerCallback

from specrl.rollout.durable import flush_directory, read_json, write_durably
from specrl.rollout.types import RolloutError

if TYPE_CHECKING:
    from specrl.trainers.rollouts import Rollouts

MARKER = "specrl.json"
TRAJECTORIES = "trajectories"
EVALUATIONS = "evaluations"
DRAFTER = "drafter"
TRANSIENT_SUFFIXES = (".lock", ".tmp")  # files of the trajectory writer that hold no data
THREADS = 4  # files are hashed in parallel; one core hashes about 1 GB/s
logger = logging.getLogger(__name__)


class CheckpointError(RolloutError):
    """A checkpoint is damaged. The message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of one optimiser step."""

    path: Path

    @property
    def step(self) -> int:
        """The optimiser step after which it was saved."""
        return int(self.path.name.partition("-")[2])

    @property
    def trajectories(self) -> Path:
        """Directory of its trajectory cache."""
        return self.path / TRAJECTORIES

    @property
    def evaluations(self) -> Path:
        """Directory of the responses of its last evaluation."""
        return self.path / EVALUATIONS

    @property
    def is_complete(self) -> bool:
        """Whether its save finished. Its files may have been damaged since."""
        return (self.path / MARKER).is_file()

    def marker(self) -> dict[str, Any]:
        """The content of the marker. Raises CheckpointError if it is unreadable, altered or of another step."""
        try:
            mark = read_json((self.path / MARKER).read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path.name} is damaged: {MARKER} cannot be read ({error})") from error
        if not isinstance(mark, dict) or mark.pop("digest", None) != _digest_of(mark) or mark["step"] != self.step:
            raise CheckpointError(f"{self.path.name} is damaged: {MARKER} is not what was written there")
        return mark

    def complete(self, content: Mapping[str, Any]) -> None:
        """Flushes every file and writes the marker with `content`. Raises OSError."""
        mark = {"step": self.step, **content, "files": self._flush()}
        mark = json.loads(json.dumps(mark))  # so that the digest is of the values that will be read
        write_durably(self.path / MARKER, json.dumps(mark | {"digest": _digest_of(mark)}).encode())

    def _flush(self) -> dict[str, list]:
        """Flushes all files, and the directories from the run's down; returns the [size, digest] of each file."""
        below = sorted(self.path.rglob("*"))
        marker = self.path / MARKER
        files = [path for path in below if path.is_file() and path.suffix not in TRANSIENT_SUFFIXES and path != marker]
        with ThreadPoolExecutor(THREADS) as pool:
            entries = list(pool.map(_flush_file, files))
        directories = [path for path in below if path.is_dir()]
        for directory in (*directories, self.path, self.path.parent, self.path.parent.parent):
            flush_directory(directory)
        return {path.relative_to(self.path).as_posix(): entry for path, entry in zip(files, entries, strict=True)}

    def verify(self, text_decides: bool) -> None:
        """Raises CheckpointError unless every file is as it was saved. See `newest` for `text_decides`."""
        files = self.marker()["files"]
        with ThreadPoolExecutor(THREADS) as pool:
            complaints = pool.map(partial(_complaint, self.path), files, files.values())
            damaged = [(name, text) for name, text in zip(files, complaints, strict=True) if text]
        fatal = []
        for name, text in damaged:
            if text_decides or not name.startswith((f"{TRAJECTORIES}/", f"{EVALUATIONS}/")):
                fatal.append(text)
            else:
                logger.warning("%s: %s; the run resumes without these drafts", self.path.name, text)
        if fatal:
            raise CheckpointError(f"{self.path.name} is damaged: {'; '.join(fatal)}")

    def restore(self, rollouts: Rollouts) -> None:
        """Restores rollouts and co-training; the trainer restores weights and optimiser. Raises RolloutError."""
        rollouts.restore(self.marker()["rollouts"])
        if rollouts.drafter_trainer:
            rollouts.drafter_trainer.load(self.path / DRAFTER)


def checkpoints(directory: Path) -> list[Checkpoint]:
    """The checkpoints of a run, sorted by step, incomplete ones included."""
    named = [path for path in directory.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(map(Checkpoint, named), key=lambda checkpoint: checkpoint.step)


def completed(directory: Path) -> list[Checkpoint]:
    """The checkpoints of a run whose save finished, sorted by step. Their files are not verified."""
    return [checkpoint for checkpoint in checkpoints(directory) if checkpoint.is_complete]


def newest(directory: Path, *, text_decides: bool = False) -> Checkpoint | None:
    """The undamaged checkpoint of the highest step, None if there are no complete checkpoints.

    Logs a warning for each newer checkpoint that is damaged.

    Args:
        text_decides: whether the stored trajectories decide what is generated. Damage to them is then treated like
            damage to the weights. Otherwise it only costs drafts and is logged as a warning.

    Raises:
        CheckpointError: all complete checkpoints are damaged.
    """
    damaged: list[str] = []
    for checkpoint in reversed(completed(directory)):
        try:
            checkpoint.verify(text_decides)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        for complaint in damaged:
            logger.warning("%s; resuming from %s", complaint, checkpoint.path.name)
        return checkpoint
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {directory} can be resumed from: {'; '.join(damaged)}. Restore its files, start another "
            f"name, or remove {directory.parent} to start anew"
        )
    return None


def set_aside_damaged(directory: Path, sound: Checkpoint) -> None:
    """Renames the checkpoints after `sound` to damaged-NAME, because the run will save these steps again."""
    for checkpoint in completed(directory):
        if checkpoint.step <= sound.step:
            continue
        suffixes = itertools.chain([""], map("-{}".format, itertools.count(2)))
        names = (checkpoint.path.with_name(f"damaged-{checkpoint.path.name}{suffix}") for suffix in suffixes)
        checkpoint.path.rename(next(name for name in names if not name.exists()))


def prune(saved: Checkpoint, keep: int) -> None:
    """Removes the checkpoints before `saved`, which was just completed, except the newest `keep` - 1 complete ones.

    The marker is removed first, so that an interrupted removal leaves no checkpoint that looks complete.
    """
    earlier = [checkpoint for checkpoint in checkpoints(saved.path.parent) if checkpoint.step < saved.step]
    complete = [checkpoint for checkpoint in earlier if checkpoint.is_complete]
    kept = complete[max(0, len(complete) - keep + 1) :]
    for checkpoint in earlier:
        if checkpoint not in kept:
            (checkpoint.path / MARKER).unlink(missing_ok=True)
            shutil.rmtree(checkpoint.path, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Converts errors of a full or failing disk while `path` is written into a one-line RolloutError.

    torch raises plain RuntimeErrors for them.
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


class CompleteCheckpoint(TrainerCallback):
    """Adds trajectories and the drafter to each checkpoint, marks it as complete, and removes the oldest ones.

    Args:
        keep: number of complete checkpoints to keep.
        data: digests of the splits of the data set, for the marker.
    """

    def __init__(self, rollouts: Rollouts, keep: int, data: Mapping[str, str]):
        self._rollouts = rollouts
        self._keep = keep
        self._data = dict(data)
        self._cache_save_s: float | None = None

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs) -> None:
        """Adds the duration of the last cache save to the next record, because a step is saved after it is logged."""
        if logs and "loss" in logs and self._cache_save_s is not None:
            logs["timing_s/cache_save"] = self._cache_save_s
            self._cache_save_s = None

    def on_save(self, args, state, control, **kwargs) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()  # waits until every process has written its part, such as its RNG state
        if not state.is_world_process_zero:
            return
        checkpoint = Checkpoint(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        self._save_cache(checkpoint)
        with writing(checkpoint.path):
            if self._rollouts.drafter_trainer:
                self._rollouts.drafter_trainer.save(checkpoint.path / DRAFTER)
            checkpoint.complete({"rollouts": self._rollouts.state(), "data": self._data})
        prune(checkpoint, self._keep)

    def _save_cache(self, checkpoint: Checkpoint) -> None:
        source = self._rollouts.source
        if source.cache is None:
            return
        began = time.perf_counter()
        source.save(checkpoint.trajectories, checkpoint.evaluations, checkpoint.step)
        self._cache_save_s = time.perf_counter() - began


def _digest_of(mark: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(mark).encode(), digest_size=16).hexdigest()


def _digest(file: BufferedReader) -> str:
    return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()


def _flush_file(path: Path) -> list:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return [os.fstat(file.fileno()).st_size, _digest(file)]


def _complaint(folder: Path, name: str, saved: list) -> str:
    """Describes the damage of a checkpoint's file, whose saved state is [size, digest]; empty if there is none."""
    size, digest = saved
    if not (folder / name).is_file():
        return f"{name} is missing"
    try:
        with (folder / name).open("rb") as file:
            size_now = os.fstat(file.fileno()).st_size
            if size_now != size:
                return f"{name} has {size_now} bytes instead of {size}"
            return "" if _digest(file) == digest else f"{name} has other bytes than were written"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
