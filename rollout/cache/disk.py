"""The on-disk form of the trajectory cache: one parquet snapshot per directory, one checksum per row, no pickle.

`docs/cache-format.md` is the specification. Everything read here counts as damaged until its checksum agrees.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollout.cache.record import FINISH, HEAD, LOGPROBS, STOP, Entry, row_checksum
from rollout.durable import replacing
from rollout.types import CacheError

FORMAT = 1
SNAPSHOT = "trajectories.parquet"
ROWS_PER_GROUP = 512
LOCK = "trajectories.lock"

_HEADER, _HEADER_SUM = b"specrl.cache", b"specrl.cache.checksum"
_HEADS = np.dtype([("key", "<i8"), ("version", "<i8"), ("step", "<i8"), ("reward", "<f8"), ("flags", "u1")])
_FINISH = {name.encode(): flag for name, flag in FINISH.items()}
_DAMAGED = 4  # a flag that no row has, so that its checksum cannot agree
_SCHEMA = pa.schema(
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("slot", pa.int64(), nullable=False),
        pa.field("tokens", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        pa.field("key", pa.int64(), nullable=False),
        pa.field("finish", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("logprobs", pa.list_(pa.field("element", pa.float32(), nullable=False))),
        pa.field("checksum", pa.uint64(), nullable=False),
    ]
)


class DamagedError(CacheError):
    """The file is not an intact snapshot: torn, written by something else, or its footer is damaged."""


class OlderFormatError(CacheError):
    """The snapshot predates this format."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the stored trajectories depend on, as short strings.

    Example: Fingerprint(identity={"tokenizer": "9f3c", "dataset": "gsm8k-1a2b"}, law={"temperature": "1.0"})
    """

    identity: Mapping[str, str] = field(default_factory=dict)
    """Must match to reuse anything: tokenizer, vocabulary, template, dataset."""
    law: Mapping[str, str] = field(default_factory=dict)
    """What the text was drawn from: model, temperature, top-p, top-k. Only the stored log-probs depend on it."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a snapshot says about itself."""

    step: int
    """Trainer step at which it was written."""
    rows: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    fingerprint: Fingerprint


def write_snapshot(directory: Path, entries: Sequence[Entry], header: Header) -> None:
    """Replaces the snapshot of `directory`, which is made if need be, atomically and durably.

    Raises CacheError on any OSError (disk full, file size limit, read-only) and when another process is writing there;
    the old snapshot is then as it was.
    """
    text = json.dumps({"format": FORMAT, **asdict(header)}).encode()
    schema = _SCHEMA.with_metadata({_HEADER: text, _HEADER_SUM: _header_sum(text)})
    try:
        # Plain pages: a flipped bit then costs one row, where a compressed page would be lost whole.
        with (
            _only_writer(directory),
            replacing(directory / SNAPSHOT) as file,
            pq.ParquetWriter(file, schema, compression="none", use_dictionary=False) as writer,
        ):
            for start in range(0, len(entries), ROWS_PER_GROUP):
                writer.write_table(_table(entries[start : start + ROWS_PER_GROUP], schema))
    except OSError as error:
        raise CacheError(
            f"The trajectory cache ({len(entries)} entries) was not saved in '{directory}' at step {header.step}: "
            f"{error.strerror or error}. The last complete snapshot is intact. Free some space or "
            "lower rollout.cache.max_mb; rollout.cache.on_write_error=warn trains on without saving."
        ) from error


@contextlib.contextmanager
def _only_writer(directory: Path) -> Iterator[None]:
    """Keeps other processes from writing; the kernel drops the lock with this one, so none is ever stale."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / LOCK, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CacheError(
                f"Another run is writing the trajectory cache in '{directory}'. "
                "Stop that run, or give this one another name."
            ) from None
        yield


def _header_sum(text: bytes) -> bytes:
    return blake2b(text, digest_size=8).hexdigest().encode()


def _table(entries: Sequence[Entry], schema: pa.Schema) -> pa.Table:
    """One row group. The lists are cut out of joined bytes: no token becomes a Python number."""
    ids, slots, blobs = zip(*entries, strict=True)
    heads = np.frombuffer(b"".join(blob[: HEAD.size] for blob in blobs), _HEADS)
    bare = (heads["flags"] & LOGPROBS) == 0
    words = np.array([(len(blob) - HEAD.size) // 4 for blob in blobs])
    counts = np.where(bare, words, words // 2)
    cuts = (HEAD.size + 4 * counts).tolist()
    tokens = b"".join(blob[HEAD.size : cut] for blob, cut in zip(blobs, cuts, strict=True))
    logprobs = b"".join(blob[cut:] for blob, cut in zip(blobs, cuts, strict=True))
    columns = [
        pa.array(ids, pa.string()),
        pa.array(slots, pa.int64()),
        _lists(counts, np.frombuffer(tokens, "<i4"), schema.field("tokens").type),
        pa.array(heads["key"]),
        pa.array(np.where(heads["flags"] & STOP, "stop", "length")),
        pa.array(heads["version"]),
        pa.array(heads["step"]),
        pa.array(heads["reward"], mask=np.isnan(heads["reward"])),
        _lists(np.where(bare, 0, counts), np.frombuffer(logprobs, "<f4"), schema.field("logprobs").type, bare),
        pa.array([row_checksum(i.encode(), slot, blob) for i, slot, blob in entries], pa.uint64()),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _lists(counts: np.ndarray, values: np.ndarray, kind: pa.DataType, null: np.ndarray | None = None) -> pa.Array:
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    mask = None if null is None else pa.array(null)
    return pa.ListArray.from_arrays(offsets, pa.array(values), type=kind, mask=mask)


@contextlib.contextmanager
def open_snapshot(directory: Path) -> Iterator[tuple[Header, Iterator[Entry]]]:
    """The verified header of a snapshot and its rows, of which only those are yielded whose checksum agrees.

    Raises FileNotFoundError without a snapshot, OlderFormatError, DamagedError, or another CacheError.
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
        except Exception as error:  # any bytes may lie here, and pyarrow reports them in a dozen ways
            raise DamagedError(f"'{path}' is not a readable parquet file ({error})") from error
        header = _header(path, schema, metadata)
        if header.rows != file.metadata.num_rows:
            raise DamagedError(f"'{path}' has {file.metadata.num_rows} rows and a header that counts {header.rows}")
        yield header, _rows(file)


def _unreadable(path: Path, why: object) -> CacheError:
    return CacheError(
        f"The trajectory cache '{path}' cannot be read: {why}. Move it away, or start with rollout.cache.clear=true."
    )


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a pipe would wait for a writer


def _header(path: Path, schema: pa.Schema, metadata: Mapping[bytes, bytes]) -> Header:
    text = metadata.get(_HEADER, b"")
    if metadata.get(_HEADER_SUM) != _header_sum(text):
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
        if not schema.equals(_SCHEMA):
            raise DamagedError(f"'{path}' does not have the columns of format {FORMAT}")
    if wrong := _wrong(fields):  # and its checksum agrees, so that no damage explains it
        raise CacheError(
            f"'{path}' has a header that is not of trajectory cache format {FORMAT}: {wrong}. Another program wrote "
            "it. Update specrl, move the file away, or start with rollout.cache.clear=true."
        )
    given = {name: fields[name] for name in ("step", "rows", "vocab_size")}
    return Header(**given, eos_ids=tuple(fields["eos_ids"]), fingerprint=Fingerprint(**fields["fingerprint"]))


def _wrong(fields: Any) -> str | None:
    """What a header of this format cannot say, as half a sentence; None when it may say all of it."""
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
    "eos_ids": lambda value: isinstance(value, list) and all(map(_count, value)),
    "fingerprint": lambda value: (
        isinstance(value, dict) and value.keys() == {"identity", "law"} and all(map(_texts, value.values()))
    ),
}


def _rows(file: pq.ParquetFile) -> Iterator[Entry]:
    for group in range(file.num_row_groups):
        try:
            rows = list(_intact(file.read_row_group(group, use_threads=False)))
        except Exception:  # a damaged page fails in a dozen ways; the other row groups are still good
            continue
        yield from rows


def _intact(table: pa.Table) -> Iterator[Entry]:
    """The rows of one row group whose checksum agrees."""
    # Text as bytes: one damaged UTF-8 sequence would otherwise fail the whole column.
    plain = {name: table[name].cast(pa.binary()) for name in ("example_id", "finish")}
    names = ("slot", "key", "version", "step", "reward", "checksum")
    columns = [plain["example_id"], plain["finish"], *(table[name] for name in names)]
    tokens, logprobs = _cut(table["tokens"], "<i4"), _cut(table["logprobs"], "<f4")
    bare = table["logprobs"].is_null().to_pylist()
    fields = zip(*(column.to_pylist() for column in columns), strict=True)
    for i, (example_id, finish, slot, key, version, step, reward, checksum) in enumerate(fields):
        flags = _FINISH.get(finish, _DAMAGED) | (0 if bare[i] else LOGPROBS)
        blob = HEAD.pack(key, version, step, nan if reward is None else reward, flags) + tokens[i] + logprobs[i]
        if row_checksum(example_id, slot, blob) == checksum:
            yield example_id.decode(), slot, blob


def _cut(column: pa.ChunkedArray, kind: str) -> list[bytes]:
    """The little-endian bytes of each list of a column; empty for null."""
    lists = column.combine_chunks()
    data = lists.values.to_numpy(zero_copy_only=False).astype(kind, copy=False).tobytes()
    ends = (lists.offsets.to_numpy() * 4).tolist()
    return [data[start:end] for start, end in itertools.pairwise(ends)]
