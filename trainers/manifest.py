"""What a checkpoint consists of: its files with sizes and digests, on the disk before anything vouches for them."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from specrl.rollout.durable import flush_directory

THREADS = 4  # digests of files are taken side by side; one core does about 1 GB/s
TRANSIENT_SUFFIXES = (".lock", ".tmp")  # what the writer of the trajectories leaves, which holds nothing


def seal(folder: Path, marker: str) -> dict[str, list]:
    """Flushes every file below `folder` and all directories that lead to them, and returns their sizes and digests.

    A digest is of what was read back after the writing. Raises OSError.

    Args: marker: name of the file that will hold the result, left out.
    """
    below = sorted(folder.rglob("*"))
    found = [
        path for path in below if path.is_file() and path.suffix not in TRANSIENT_SUFFIXES and path != folder / marker
    ]
    with ThreadPoolExecutor(THREADS) as pool:
        sealed = list(pool.map(_seal_file, found))
    for directory in (*(path for path in below if path.is_dir()), folder, folder.parent, folder.parent.parent):
        flush_directory(directory)
    return {path.relative_to(folder).as_posix(): entry for path, entry in zip(found, sealed, strict=True)}


def _seal_file(path: Path) -> list:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return [os.fstat(file.fileno()).st_size, digest(file)]


def digest(file) -> str:
    return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()
