"""Files that are replaced atomically, so that a crash or a power cut leaves the old one or the new one."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write in a `with` block, which at the end replaces `path` durably.

    Raises OSError. If anything is raised, `path` is unchanged. One writer at a time.
    """
    draft = path.with_name(f"{path.name}.tmp")  # one name, so the file of a killed writer is overwritten
    try:
        draft.unlink(missing_ok=True)  # a link or a pipe in its place is not followed
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        flush_directory(path.parent)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def write_durably(path: Path, data: bytes) -> None:
    """Replaces a file by these bytes, see `replacing`."""
    with replacing(path) as file:
        file.write(data)


def read_json(text: str | bytes) -> Any:
    """`json.loads`, with a ValueError also for text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def open_lock(path: Path) -> int:
    """A descriptor of a lock file, created if missing and otherwise unchanged; its holder may write once it is locked.

    Raises OSError, also for a link, a pipe or a directory of that name.
    """
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        linked = error.errno == errno.ELOOP
        raise OSError(error.errno, "it is a symbolic link" if linked else error.strerror, str(path)) from error
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        os.close(lock)
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    return lock


def flush_directory(path: Path) -> None:
    """Makes the entries of a directory durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
