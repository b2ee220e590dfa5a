"""The trajectory cache on disk: one parquet snapshot per directory, with one digest over all rows and no pickle.

`docs/cache-format.md` is the specification.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
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

from specrl.rollout.cache.record import FINISH, HEAD, LOGPROBS, STOP, Entry, digest_of
from specrl.rollout.durable import open_lock, read_json, replacing
from specrl.rollout.types import CacheError

FORMAT = 3
SNAPSHOT = "trajectories.parquet"
ROWS_PER_GROUP = 512
LOCK = "trajectories.lock"

HEADER, HEADER_SUM = b"specrl.cache", b"specrl.cache.checksum"
_HEADS = np.dtype([("key", "<i8"), ("version", "<i8"), ("step", "<i8"), ("reward", "<f8"), ("flags", "u1")])
SCHEMA = pa.schema(
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int64(), nullable=False),
        pa.field("tokens", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        pa.field("key", pa.int64(), nullable=False),
        pa.field("finish", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("logprobs", pa.list_(pa.field("element", pa.float32(), nullable=False))),
    ]
)


class DamagedError(CacheError):
    """The file is truncated, altered, or was written by another program."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The settings that stored trajectories depend on, as short strings.

    Example: Fingerprint(identity={"tokenizer": "9f3c", "dataset": "gsm8k-1a2b"}, sampling={"temperature": "1.0"})
    """

    identity: Mapping[str, str] = field(default_factory=dict)
    """Tokenizer, vocabulary, template and dataset. Nothing is reused unless they match."""
    sampling: Mapping[str, str] = field(default_factory=dict)
    """Model, temperature, top-p and top-k of the stored texts. Only the stored log-probs depend on them."""


@dataclass(frozen=True, slots=True)
class Header:
    """The metadata of a snapshot."""

    step: int
    """Trainer step at which the snapshot was written."""
    rows: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    fingerprint: Fingerprint
    digest: str
    """`digest_of` the rows."""


_KINDS = {
    "format": int,
    "step": int,
    "rows": int,
    "vocab_size": int,
    "eos_ids": list,
    "fingerprint": dict,
    "digest": str,
}
"""Types of the header's fields, as JSON."""
_PARTS = {"identity": dict, "sampling": dict}


def write_snapshot(directory: Path, entries: Sequence[Entry], header: Header) -> None:
    """Replaces the snapshot in `directory` atomically and durably. A missing directory is created.

    Raises:
        CacheError: an OSError occurred (disk full, file size limit, read-only), or another process is writing to the
            directory. The old snapshot is then unchanged.
    """
    try:
        with _only_writer(directory):
            write_file(directory / SNAPSHOT, entries, header, compression="none")
    except OSError as error:
        raise CacheError(
            f"The trajectory cache ({len(entries)} entries) was not saved in '{directory}' at step {header.step}: "
            f"{error.strerror or error}. The last complete snapshot is intact. Free some space or "
            "lower rollout.cache.max_mb; rollout.cache.on_write_error=warn trains on without saving."
        ) from error


def write_file(path: Path, entries: Sequence[Entry], header: Header, compression: str) -> None:
    """Replaces a file of this format atomically and durably. Raises OSError, and leaves the old file then."""
    text = json.dumps({"format": FORMAT, **asdict(header)}).encode()
    schema = SCHEMA.with_metadata({HEADER: text, HEADER_SUM: _sum(text)})
    with (
        replacing(path) as file,
        pq.ParquetWriter(file, schema, compression=compression, use_dictionary=False) as writer,
    ):
        for start in range(0, len(entries), ROWS_PER_GROUP):
            writer.write_table(_table(entries[start : start + ROWS_PER_GROUP], schema))


@contextlib.contextmanager
def _only_writer(directory: Path) -> Iterator[None]:
    """Locks out other writers. The kernel releases the lock when this process ends, so it is never stale."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(open_lock(directory / LOCK), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CacheError(
                f"Another run is writing the trajectory cache in '{directory}'. "
                "Stop that run, or give this one another name."
            ) from None
        yield


def _sum(text: bytes) -> bytes:
    return blake2b(text, digest_size=8).hexdigest().encode()


def _table(entries: Sequence[Entry], schema: pa.Schema) -> pa.Table:
    """One row group. The lists are slices of joined bytes, so no token is converted to a Python int."""
    ids, sample_indices, blobs = zip(*entries, strict=True)
    heads = np.frombuffer(b"".join(blob[: HEAD.size] for blob in blobs), _HEADS)
    bare = (heads["flags"] & LOGPROBS) == 0
    words = np.array([(len(blob) - HEAD.size) // 4 for blob in blobs])
    counts = np.where(bare, words, words // 2)
    cuts = (HEAD.size + 4 * counts).tolist()
    tokens = b"".join(blob[HEAD.size : cut] for blob, cut in zip(blobs, cuts, strict=True))
    logprobs = b"".join(blob[cut:] for blob, cut in zip(blobs, cuts, strict=True))
    columns = [
        pa.array(ids, pa.string()),
        pa.array(sample_indices, pa.int64()),
        _lists(counts, np.frombuffer(tokens, "<i4"), schema.field("tokens").type),
        pa.array(heads["key"]),
        pa.array(np.where(heads["flags"] & STOP, "stop", "length")),
        pa.array(heads["version"]),
        pa.array(heads["step"]),
        pa.array(heads["reward"], mask=np.isnan(heads["reward"])),
        _lists(np.where(bare, 0, counts), np.frombuffer(logprobs, "<f4"), schema.field("logprobs").type, bare),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _lists(counts: np.ndarray, values: np.ndarray, kind: pa.DataType, null: np.ndarray | None = None) -> pa.Array:
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    mask = None if null is None else pa.array(null)
    return pa.ListArray.from_arrays(offsets, pa.array(values), type=kind, mask=mask)


def read_snapshot(directory: Path) -> tuple[Header, list[Entry]]:
    """The verified header and entries of the snapshot in `directory`; see `read_file`."""
    return read_file(directory / SNAPSHOT)


def read_keys(path: Path) -> tuple[Header, np.ndarray]:
    """The header of a file of this format and the noise keys [rows] int64, which are not verified.

    Raises: as `read_file`.
    """
    with _opened(path) as (header, file):
        return header, file.read(columns=["key"])["key"].to_numpy()


def read_file(path: Path) -> tuple[Header, list[Entry]]:
    """The verified header and entries of a file of this format.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedError: nothing of it can be used.
        CacheError: the file cannot be used for another reason.
    """
    with _opened(path) as (header, file):
        groups = (file.read_row_group(group, use_threads=False) for group in range(file.num_row_groups))
        entries = [entry for table in groups for entry in _entries(table)]
        digest = digest_of(entries)
    if digest != header.digest:
        raise DamagedError(f"'{path}' does not hold the rows that were written: their digest is another")
    return header, entries


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Header, pq.ParquetFile]]:
    """The header and the file. What a damaged page raises in the `with` block becomes a DamagedError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would wait for a writer
            raise _unreadable(path, "it is a directory, a pipe or a device, not a file")
        source = path.open("rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error.strerror or error) from error
    with source:
        try:
            file = pq.ParquetFile(source, pre_buffer=False, arrow_extensions_enabled=False)
            schema = file.schema_arrow
            metadata = file.metadata.metadata or {}
        except MemoryError as error:
            raise _unreadable(path, f"memory ran out ({error})") from error
        except Exception as error:  # the file may hold any bytes, and pyarrow raises many types of errors
            raise DamagedError(f"'{path}' is not a readable parquet file ({error})") from error
        header = _header(path, schema, metadata)
        if header.rows != file.metadata.num_rows:
            raise DamagedError(f"'{path}' has {file.metadata.num_rows} rows and a header that counts {header.rows}")
        try:
            yield header, file
        except MemoryError as error:  # a sound file may need more than there is
            raise _unreadable(path, f"memory ran out ({error})") from error
        except Exception as error:  # a damaged page raises many types of errors
            raise DamagedError(f"'{path}' has rows that cannot be read ({error})") from error


def _unreadable(path: Path, why: object) -> CacheError:
    return CacheError(
        f"The trajectory cache '{path}' cannot be read: {why}. Move it away, or start with rollout.cache.clear=true."
    )


def _header(path: Path, schema: pa.Schema, metadata: Mapping[bytes, bytes]) -> Header:
    text = metadata.get(HEADER, b"")
    if metadata.get(HEADER_SUM) != _sum(text):
        raise DamagedError(f"'{path}' has no intact specrl header")
    try:
        fields = read_json(text)
    except ValueError:
        fields = None
    if wrong := _wrong(fields):  # the checksum matches, so the header is not damaged
        raise CacheError(
            f"'{path}' has a header that is not of trajectory cache format {FORMAT}: {wrong}. Another version or "
            "program wrote it. Update specrl, move the file away, or start with rollout.cache.clear=true."
        )
    if not schema.equals(SCHEMA):
        raise DamagedError(f"'{path}' does not have the columns of format {FORMAT}")
    del fields["format"]
    fields["eos_ids"] = tuple(fields["eos_ids"])
    fields["fingerprint"] = Fingerprint(**fields["fingerprint"])
    return Header(**fields)


def _wrong(fields: Any) -> str:
    """The first field of a header that this format does not allow, empty if there is none."""
    if not isinstance(fields, dict):
        return "it is no JSON object"
    wrong = [name for name in _KINDS if type(fields.get(name)) is not _KINDS[name]]
    wrong += sorted(fields.keys() - _KINDS.keys())
    if fields.get("format") != FORMAT:
        wrong = ["format"]
    elif not wrong and {part: type(texts) for part, texts in fields["fingerprint"].items()} != _PARTS:
        wrong = ["fingerprint"]
    return f"{wrong[0]}={fields.get(wrong[0])!r:.60}" if wrong else ""


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
