"""Which checkpoint a run goes on from: the newest whose files are all as they were saved."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from trainers.checkpoint import CACHE, CheckpointError, marked, read_marker, step_of
from trainers.manifest import THREADS, digest

logger = logging.getLogger(__name__)


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
