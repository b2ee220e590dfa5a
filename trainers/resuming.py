"""Going on from a checkpoint: the newest whose files are all as they were saved, and what it holds."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrl.rollout.durable import read_json
from specrl.rollout.types import RolloutError
from specrl.trainers.checkpoint import CACHE, MARKER, digest_of, marked, step_of
from specrl.trainers.manifest import THREADS, digest

if TYPE_CHECKING:
    from specrl.trainers.rollouts import Rollouts

logger = logging.getLogger(__name__)


class CheckpointError(RolloutError):
    """A checkpoint that cannot be gone on from. The message names the file and what is wrong with it."""


def newest(directory: Path, *, text_decides: bool = False) -> Path | None:
    """The sound checkpoint of the highest step, None without any checkpoint. Damaged newer ones are warned of.

    Args: text_decides: damaged trajectories count like damaged weights, as the stored text decides what is generated;
        else they cost drafts only, and are a warning.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    damaged = []
    for path in reversed(marked(directory)):
        try:
            verify(path, text_decides)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        for complaint in damaged:
            logger.warning("%s; going on from %s", complaint, path.name)
        return path
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {directory} can be gone on from: {'; '.join(damaged)}. Restore its files, start another "
            f"name, or remove {directory.parent} to start anew"
        )
    return None


def verify(checkpoint: Path, text_decides: bool) -> None:
    """Raises CheckpointError unless every file is as it was saved; `text_decides` as for `newest`."""
    files = read_marker(checkpoint)["files"]
    cached = {name: entry for name, entry in files.items() if name.startswith(f"{CACHE}/")}
    found = complaints(checkpoint, {name: entry for name, entry in files.items() if name not in cached})
    for complaint in complaints(checkpoint, cached):
        if text_decides:
            found.append(complaint)
        else:
            logger.warning("%s: %s; what is sound of the trajectories is used", checkpoint.name, complaint)
    if found:
        raise CheckpointError(f"{checkpoint.name} is damaged: {'; '.join(found)}")


def restore(checkpoint: Path, rollouts: Rollouts) -> None:
    """Brings rollouts and companions to where they were. Raises RolloutError."""
    rollouts.restore(read_marker(checkpoint)["rollouts"])
    for name, companion in rollouts.companions.items():
        companion.load(checkpoint / name)


def data_digests(checkpoint: Path) -> dict[str, str]:
    """The digest of each split of the data that the run began with."""
    return read_marker(checkpoint)["data"]


def read_marker(checkpoint: Path) -> dict[str, Any]:
    """What the marker holds. Raises CheckpointError unless it is the one that was written for this checkpoint."""
    try:
        mark = read_json((checkpoint / MARKER).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.name} is damaged: {MARKER} cannot be read ({error})") from error
    if not isinstance(mark, dict) or mark.pop("digest", None) != digest_of(mark) or mark["step"] != step_of(checkpoint):
        raise CheckpointError(f"{checkpoint.name} is damaged: {MARKER} is not what was written there")
    return mark


def leave_aside(directory: Path, sound: Path) -> None:
    """Renames the damaged checkpoints after `sound` to damaged-NAME: the run will write these steps again."""
    for path in marked(directory):
        if step_of(path) > step_of(sound):
            names = itertools.chain([""], map("-{}".format, itertools.count(2)))
            path.rename(next(new for n in names if not (new := path.with_name(f"damaged-{path.name}{n}")).exists()))


def complaints(folder: Path, files: Mapping[str, list]) -> list[str]:
    """What is wrong with `files` in `folder`, one text a file; empty when all are as they were sealed."""
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(partial(_complaint, folder), files, files.values())
        return [text for text in found if text]


def _complaint(folder: Path, name: str, sealed: list) -> str | None:
    size, sealed_as = sealed
    if not (folder / name).is_file():
        return f"{name} is missing"
    try:
        with (folder / name).open("rb") as file:
            if (there := os.fstat(file.fileno()).st_size) != size:
                return f"{name} has {there} bytes instead of {size}"
            return None if digest(file) == sealed_as else f"{name} has other bytes than were written"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
