"""Imported at the start of every Python process of a soak: a wall clock that jumps, a disk full for the cache."""

import errno
import os
import time

JUMPS_S = (0, 86_400, -3_600, 10 * 365 * 86_400, -86_400)
PERIOD_S = 0.2  # several jumps in a run of a second

_time, _fsync = time.time, os.fsync


def _jump() -> int:
    return JUMPS_S[int(time.monotonic() // PERIOD_S) % len(JUMPS_S)]


def _full(fd: int) -> None:
    """fsync, but no space left for trajectories while the file that SOAK_DISK_FULL names is there."""
    target = os.readlink(f"/proc/self/fd/{fd}")
    if target.endswith("trajectories.parquet.tmp") and os.path.exists(os.environ["SOAK_DISK_FULL"]):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    _fsync(fd)


if "SOAK_DISK_FULL" in os.environ:
    time.time = lambda: _time() + _jump()
    time.time_ns = lambda: int(time.time() * 1e9)
    os.fsync = _full
