"""Files that are replaced as a whole, so that a crash or a power cut leaves the old one or the new one; and reading
what may have been damaged all the same.
"""

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
    """A file to write in a `with` block, at the end of which it takes the place of `path` and is on the disk.

    Raises OSError. Whatever is raised, `path` is then as it was. One writer at a time.
    """
    draft = path.with_name(f"{path.name}.tmp")  # one name, so what a killed writer left is overwritten
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
    """`replacing` by these bytes."""
    with replacing(path) as file:
        file.write(data)


def read_json(text: str | bytes) -> Any:
    """`json.loads`; what is nested too deep to be read is a ValueError too, as all else that is no JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def open_lock(path: Path) -> int:
    """A descriptor of a lock file, made if need be. Nothing in it changes: its holder may write once it is locked.

    Raises OSError, where a link, a pipe or a directory has its name too.
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
    """Makes the names in a directory survive a power cut."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
