"""The trajectory cache keeps the last epoch's responses as drafts for the next. It is bounded and saved atomically.

It maps (example id, sample index) to a trajectory, so reshuffling, a different group size or a different number of
workers has no effect. A row whose entry is missing or was dropped is generated without this draft.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from specrl.rollout.cache.record import Entry, complaint, origin, pack, unpack
from specrl.rollout.cache.snapshot import SNAPSHOT, DamagedError, Fingerprint, read_file, write_snapshot
from specrl.rollout.reduction import Metric, count, highest
from specrl.rollout.types import CacheError, Trajectory

__all__ = ["Fingerprint", "TrajectoryCache", "load"]

# Added to sys.getsizeof: the allocator rounding of an entry, and the LRU node and hash table share of an example.
ENTRY_BYTES, EXAMPLE_BYTES = 16, 144

logger = logging.getLogger(__name__)


class TrajectoryCache:
    """The cache of one run."""

    def __init__(self, fingerprint: Fingerprint, *, max_mb: float = 512):
        """`max_mb` limits `bytes`, in units of 2^20."""
        self.fingerprint = fingerprint
        self.bytes = 0
        """Memory in use, with all overhead."""
        self.evictions = self.dropped = self.skipped = self.quarantined = self.write_errors = 0
        self._limit = int(max_mb * 2**20)
        self._examples: OrderedDict[str, dict[int, bytes]] = OrderedDict()  # least recently stored first
        self._warned = False

    def __len__(self) -> int:
        """Number of stored trajectories."""
        return sum(map(len, self._examples.values()))

    def get(self, example_id: str, sample_index: int) -> Trajectory | None:
        """The latest trajectory of the sample, or None."""
        blob = self._examples.get(example_id, {}).get(sample_index)
        return None if blob is None else unpack(blob)

    def siblings(self, example_id: str, but: int | None = None) -> list[Trajectory]:
        """The stored trajectories of a prompt except sample `but`, newest step first, then by sample index."""
        samples = sorted(self._examples.get(example_id, {}).items())
        samples.sort(key=lambda item: origin(item[1]), reverse=True)
        return [unpack(blob) for sample_index, blob in samples if sample_index != but]

    def put(self, example_id: str, sample_index: int, trajectory: Trajectory) -> None:
        """Stores one trajectory, see `put_many`."""
        self.put_many([(example_id, sample_index, trajectory)])

    def put_many(self, entries: Iterable[tuple[str, int, Trajectory]]) -> None:
        """Stores all entries, or none: raises CacheError if one is older than the stored trajectory."""
        packed = _packed(entries)
        for example_id, sample_index, blob in packed:
            self._refuse_older(example_id, sample_index, blob)
        self.insert(packed)

    def merge(self, entries: Iterable[tuple[str, int, Trajectory]]) -> None:
        """Adds entries of other processes and keeps the newer of two trajectories of a sample.

        Merging the same entries in the same order gives equal caches.
        """
        self.insert([entry for entry in _packed(entries) if self._stored_origin(*entry[:2]) <= origin(entry[2])])

    def stats(self) -> dict[str, Metric]:
        """Gauges and totals for the metrics file. A MB is 2^20 bytes; all other values are counts.

        Every process of a run holds all entries, so only `write_errors` differs: one process saves the cache.
        """
        return {
            "cache/size_mb": highest(self.bytes / 2**20),
            "cache/entries": highest(len(self)),
            "cache/examples": highest(len(self._examples)),
            "cache/evictions": highest(self.evictions),
            "cache/dropped": highest(self.dropped),
            "cache/skipped": highest(self.skipped),
            "cache/quarantined": highest(self.quarantined),
            "cache/write_errors": count(self.write_errors),
        }

    def save(self, directory: str | Path, step: int) -> None:
        """Writes one snapshot, which is durable when this returns. After a failure the previous one is still readable.

        A failure, such as a full disk or a second writer, is counted, and the first one after each successful save is
        logged.
        """
        entries = [
            (example_id, sample_index, blob)
            for example_id, samples in self._examples.items()
            for sample_index, blob in samples.items()
        ]
        try:
            write_snapshot(Path(directory), entries, self.fingerprint, step)
            self._warned = False
        except CacheError as error:
            self.write_errors += 1
            if not self._warned:
                logger.warning("%s Training goes on without saving the cache.", error)
            self._warned = True

    def _stored_origin(self, example_id: str, sample_index: int) -> tuple[int, int]:
        blob = self._examples.get(example_id, {}).get(sample_index)
        return (-1, -1) if blob is None else origin(blob)

    def _refuse_older(self, example_id: str, sample_index: int, blob: bytes) -> None:
        old_step, old_version = self._stored_origin(example_id, sample_index)
        step, version = origin(blob)
        if step < old_step or version < old_version:
            raise CacheError(
                f"The trajectory of example {example_id!r}, sample {sample_index} is of step {step}, version "
                f"{version}, but step {old_step}, version {old_version} is stored already. "
                "A counter went back; after a resume, load with the checkpoint's step as max_step."
            )

    def insert(self, packed: Sequence[Entry]) -> None:
        """Stores packed entries."""
        # All their examples are marked as recent first, so that none of them is evicted. A look-up does not mark an
        # example: those for rollouts ahead and for control rows must not influence eviction.
        for example_id, _, _ in packed:
            if example_id in self._examples:
                self._examples.move_to_end(example_id)
        for example_id, sample_index, blob in packed:
            self._put(example_id, sample_index, blob)
            self._examples.move_to_end(example_id)
            self._evict(sample_index)

    def _put(self, example_id: str, sample_index: int, blob: bytes) -> None:
        samples = self._examples.get(example_id)
        if samples is None:
            samples = self._examples[example_id] = {}
            self.bytes += EXAMPLE_BYTES + sys.getsizeof(example_id) + sys.getsizeof(samples)
        self.bytes -= sys.getsizeof(samples)
        if sample_index in samples:
            self.bytes -= _size(samples[sample_index])
        samples[sample_index] = blob
        self.bytes += sys.getsizeof(samples) + _size(blob)

    def _evict(self, newest: int) -> None:
        while self.bytes > self._limit and self._examples:
            example_id, samples = next(iter(self._examples.items()))
            if len(self._examples) > 1 or len(samples) == 1:
                del self._examples[example_id]
                self.bytes -= EXAMPLE_BYTES + sys.getsizeof(example_id) + sys.getsizeof(samples)
                self.bytes -= sum(map(_size, samples.values()))
                self.evictions += len(samples)
            else:  # one example exceeds the limit: its oldest sample is evicted, the new one last
                oldest = min(samples, key=lambda s: (origin(samples[s]), s == newest, s))
                self.bytes -= _size(samples.pop(oldest))
                self.evictions += 1


def _packed(entries: Iterable[tuple[str, int, Trajectory]]) -> list[Entry]:
    return [(example_id, sample_index, pack(trajectory)) for example_id, sample_index, trajectory in entries]


def _size(blob: bytes) -> int:
    return sys.getsizeof(blob) + ENTRY_BYTES


def load(
    directory: str | Path,
    fingerprint: Fingerprint,
    vocab_size: int,
    eos_ids: Collection[int] = (),
    *,
    max_step: int | None = None,
    max_mb: float = 512,
    check_sampling: bool = False,
    new_run: bool = False,
) -> TrajectoryCache:
    """The cache saved in `directory`, or an empty one if there is none or it is damaged.

    A damaged file is renamed to *.corrupt and not used. Entries that are invalid for this vocabulary, or if there are
    `eos_ids` have another finish reason than their last token says, are dropped and counted in `dropped`; entries of
    steps after `max_step` are skipped and counted in `skipped`. If the sampling parameters differ, the stored log-probs
    are dropped, or with `check_sampling` this is an error. `new_run` sets steps and versions to 0, where the counters
    of a new run start.

    Raises:
        CacheError: the identity or the format differs, or the path cannot be read.
    """
    cache = TrajectoryCache(fingerprint, max_mb=max_mb)
    path = Path(directory) / SNAPSHOT
    try:
        stored, entries = read_file(path)
    except FileNotFoundError:  # nothing has been saved here yet
        return cache
    except DamagedError as error:
        cache.quarantined = 1
        with suppress(OSError):
            os.replace(path, f"{path}.corrupt")
        logger.warning("%s. It is kept as '%s.corrupt'; starting with an empty trajectory cache.", error, path.name)
        return cache
    other_sampling = not _same_sampling(fingerprint, stored, path, check_sampling)
    first = ""
    for example_id, sample_index, blob in entries:
        trajectory = unpack(blob)
        if reason := complaint(trajectory, vocab_size, eos_ids):
            cache.dropped += 1
            first = first or f"example {example_id!r}, sample_index {sample_index}: {reason}"
        elif max_step is not None and trajectory.step > max_step:
            cache.skipped += 1
        else:
            if other_sampling:
                trajectory = replace(trajectory, logprobs=None)
            if new_run:
                trajectory = replace(trajectory, step=0, version=0)
            cache.insert([(example_id, sample_index, pack(trajectory) if other_sampling or new_run else blob)])
    if cache.dropped:
        left_out = f"{cache.dropped} of {len(entries)} entries are malformed and left out"
        logger.warning("'%s': %s. The first is %s.", path, left_out, first)
    return cache


def _same_sampling(here: Fingerprint, there: Fingerprint, path: Path, required: bool) -> bool:
    """Whether the sampling parameters agree.

    Raises:
        CacheError: the identity differs, or the sampling parameters do although they are `required` to agree.
    """
    sampling = differences(here.sampling, there.sampling)
    wrong = differences(here.identity, there.identity) + (sampling if required else [])
    if wrong:
        raise CacheError(
            f"The trajectory cache '{path}' was written with other settings: {'; '.join(wrong)}. "
            "Go back to the old ones, or move it away to begin with an empty cache."
        )
    return not sampling


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """One message for each key whose values differ, with both values."""
    keys = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
    return [f"{key} was {there.get(key, 'absent')!r} there, is {here.get(key, 'absent')!r} here" for key in keys]
