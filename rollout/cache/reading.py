"""Reads a snapshot into a cache. Unless the digest of all rows matches, none of them is used."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specrl.rollout.cache.disk import FORMAT, HEADER, HEADER_SUM, SCHEMA, SNAPSHOT, Fingerprint, Header, header_sum
from specrl.rollout.cache.memory import TrajectoryCache
from specrl.rollout.cache.record import FINISH, HEAD, LOGPROBS, Entry, complaint, digest_of, pack, unpack
from specrl.rollout.types import CacheError

logger = logging.getLogger(__name__)


class DamagedError(CacheError):
    """The file is truncated, altered, or was written by another program."""


class OlderFormatError(CacheError):
    """The snapshot has an older format."""


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
    """The cache saved in `directory`, or an empty one if there is none, it is damaged or its format is older.

    A damaged file is renamed to *.corrupt and not used. Entries that are invalid for this vocabulary are dropped and
    counted in `dropped`; entries of steps after `max_step` are skipped and counted in `skipped`. If the sampling
    parameters differ, the stored log-probs are dropped, or with `check_sampling` this is an error. `new_run` sets steps
    and versions to 0, where the counters of a new run start.

    Raises:
        CacheError: the identity differs, the format is newer, the header is invalid although its checksum matches, or
            the path cannot be read.
    """
    cache, path = TrajectoryCache(fingerprint, vocab_size, eos_ids, max_mb=max_mb), Path(directory) / SNAPSHOT
    try:
        header, entries = read_snapshot(Path(directory))
        changes: dict[str, int | None] = (
            {} if _matches(fingerprint, header.fingerprint, path, check_sampling) else {"logprobs": None}
        )
        changes |= {"step": 0, "version": 0} if new_run else {}
        cache.dropped = sum(not _admit(cache, *entry, max_step, changes) for entry in entries)
        if cache.dropped:
            logger.warning("'%s': %d of %d entries make no sense and are left out.", path, cache.dropped, header.rows)
    except FileNotFoundError:
        pass  # nothing has been saved here yet, so the cache is empty
    except OlderFormatError as error:
        logger.warning("%s. Starting with an empty trajectory cache.", error)
    except DamagedError as error:
        cache.quarantined = 1
        with contextlib.suppress(OSError):
            os.replace(path, f"{path}.corrupt")
        logger.warning("%s. It is kept as '%s.corrupt'; starting with an empty trajectory cache.", error, path.name)
    return cache


def _matches(here: Fingerprint, there: Fingerprint, path: Path, check_sampling: bool) -> bool:
    sampling = _differences(here.sampling, there.sampling)
    wrong = _differences(here.identity, there.identity) + (sampling if check_sampling else [])
    if wrong:
        raise CacheError(
            f"The trajectory cache '{path}' was written with other settings: {'; '.join(wrong)}. "
            "Start with rollout.cache.clear=true, or go back to the old ones."
        )
    return not sampling


def _admit(
    cache: TrajectoryCache, example_id: str, sample_index: int, blob: bytes, max_step: int | None, changes: dict
) -> bool:
    """Stores one entry after changing some of its fields. Returns False if the entry is invalid."""
    trajectory = unpack(blob)
    if complaint(sample_index, trajectory, cache.vocab_size, cache.eos_ids) is not None:
        return False
    if max_step is not None and trajectory.step > max_step:
        cache.skipped += 1
    else:
        cache.insert([(example_id, sample_index, pack(replace(trajectory, **changes)) if changes else blob)])
    return True


def _differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """One message for each key whose values differ, with both values."""
    keys = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
    return [f"{key} was {there.get(key, 'absent')!r} there, is {here.get(key, 'absent')!r} here" for key in keys]


def read_snapshot(directory: Path) -> tuple[Header, list[Entry]]:
    """The verified header and entries of a snapshot.

    Raises:
        FileNotFoundError: there is no snapshot.
        OlderFormatError, DamagedError: the subclasses of CacheError for which `load` starts with an empty cache.
        CacheError: the snapshot cannot be used for another reason.
    """
    path = directory / SNAPSHOT
    try:
        source = open(path, "rb", opener=_without_waiting)  # noqa: SIM115
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error.strerror or error) from error
    with source:
        if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            raise _unreadable(path, "it is a pipe or a device, not a file")
        try:
            file = pq.ParquetFile(source, pre_buffer=False, arrow_extensions_enabled=False)
            schema, metadata = file.schema_arrow, file.metadata.metadata or {}
        except Exception as error:  # the file may hold any bytes, and pyarrow raises many types of errors
            raise DamagedError(f"'{path}' is not a readable parquet file ({error})") from error
        header = _header(path, schema, metadata)
        if header.rows != file.metadata.num_rows:
            raise DamagedError(f"'{path}' has {file.metadata.num_rows} rows and a header that counts {header.rows}")
        try:
            groups = (file.read_row_group(group, use_threads=False) for group in range(file.num_row_groups))
            entries = [entry for table in groups for entry in _entries(table)]
            digest = digest_of(entries)
        except Exception as error:  # a damaged page raises many types of errors
            raise DamagedError(f"'{path}' has rows that cannot be read ({error})") from error
    if digest != header.digest:
        raise DamagedError(f"'{path}' does not hold the rows that were written: their digest is another")
    return header, entries


def _unreadable(path: Path, why: object) -> CacheError:
    return CacheError(
        f"The trajectory cache '{path}' cannot be read: {why}. Move it away, or start with rollout.cache.clear=true."
    )


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a pipe would wait for a writer


def _header(path: Path, schema: pa.Schema, metadata: Mapping[bytes, bytes]) -> Header:
    text = metadata.get(HEADER, b"")
    if metadata.get(HEADER_SUM) != header_sum(text):
        raise DamagedError(f"'{path}' has no intact specrl header")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if type(written_as := fields.get("format") if isinstance(fields, dict) else None) is int:
        if written_as > FORMAT:
            raise CacheError(
                f"'{path}' has trajectory cache format {written_as}; this version of specrl reads up to {FORMAT}. "
                "Update specrl, or start with rollout.cache.clear=true."
            )
        if written_as < FORMAT:
            raise OlderFormatError(f"'{path}' has trajectory cache format {written_as}, older than {FORMAT}")
        if not schema.equals(SCHEMA):
            raise DamagedError(f"'{path}' does not have the columns of format {FORMAT}")
    if wrong := _wrong(fields):  # the checksum matches, so the header is not damaged
        raise CacheError(
            f"'{path}' has a header that is not of trajectory cache format {FORMAT}: {wrong}. Another program wrote "
            "it. Update specrl, move the file away, or start with rollout.cache.clear=true."
        )
    copied = {name: fields[name] for name in ("step", "rows", "vocab_size", "digest")}
    return Header(**copied, eos_ids=tuple(fields["eos_ids"]), fingerprint=Fingerprint(**fields["fingerprint"]))


def _wrong(fields: Any) -> str | None:
    """The first error in a header of this format, as part of a message, or None."""
    if not isinstance(fields, dict):
        return "it is no JSON object"
    if extra := sorted(fields.keys() - _LEGAL.keys()):
        return f"this version of specrl does not know its field {extra[0]!r:.60}"
    wrong = [name for name, legal in _LEGAL.items() if name not in fields or not legal(fields[name])]
    return f"{wrong[0]}={fields.get(wrong[0])!r:.60}" if wrong else None


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


_LEGAL = {
    **dict.fromkeys(("format", "step", "rows", "vocab_size"), _count),
    "digest": lambda value: isinstance(value, str),
    "eos_ids": lambda value: isinstance(value, list) and all(map(_count, value)),
    "fingerprint": lambda value: (
        isinstance(value, dict) and value.keys() == {"identity", "sampling"} and all(map(_texts, value.values()))
    ),
}


def _entries(table: pa.Table) -> Iterator[Entry]:
    """The entries of one row group."""
    names = ("example_id", "sample_index", "finish", "key", "version", "step", "reward")
    fields = zip(*(table[name].to_pylist() for name in names), strict=True)
    tokens, logprobs = _cut(table["tokens"], "<i4"), _cut(table["logprobs"], "<f4")
    bare = table["logprobs"].is_null().to_pylist()
    for i, (example_id, sample_index, finish, key, version, step, reward) in enumerate(fields):
        flags = FINISH[finish] | (0 if bare[i] else LOGPROBS)
        head = HEAD.pack(key, version, step, nan if reward is None else reward, flags)
        yield example_id, sample_index, head + tokens[i] + logprobs[i]


def _cut(column: pa.ChunkedArray, kind: str) -> list[bytes]:
    """The little-endian bytes of each list of a column, b"" for null."""
    lists = column.combine_chunks()
    data = lists.values.to_numpy(zero_copy_only=False).astype(kind, copy=False).tobytes()
    ends = (lists.offsets.to_numpy() * 4).tolist()
    return [data[start:end] for start, end in itertools.pairwise(ends)]
