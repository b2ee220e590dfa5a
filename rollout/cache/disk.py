"""Writes the trajectory cache as one parquet snapshot per directory, with one digest over all rows and no pickle.

`docs/cache-format.md` is the specification. `reading.py` reads the snapshots.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specrl.rollout.cache.record import HEAD, LOGPROBS, STOP, Entry
from specrl.rollout.durable import open_lock, replacing
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


def write_snapshot(directory: Path, entries: Sequence[Entry], header: Header) -> None:
    """Replaces the snapshot in `directory` atomically and durably. A missing directory is created.

    Raises:
        CacheError: an OSError occurred (disk full, file size limit, read-only), or another process is writing to the
            directory. The old snapshot is then unchanged.
    """
    text = json.dumps({"format": FORMAT, **asdict(header)}).encode()
    schema = SCHEMA.with_metadata({HEADER: text, HEADER_SUM: header_sum(text)})
    try:
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


def header_sum(text: bytes) -> bytes:
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
