"""Files of trajectories: parquet with one digest over the header and all rows, and no pickle.

`docs/cache-format.md` is the specification.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from specrl.rollout.cache.record import Entry, key_of
from specrl.rollout.durable import open_lock, read_json, replacing
from specrl.rollout.types import CacheError

FORMAT = 4
SNAPSHOT = "trajectories.parquet"
ROWS_PER_GROUP = 512
LOCK = "trajectories.lock"

HEADER, DIGEST = b"specrl.cache", b"specrl.cache.digest"
_TYPES = {"example_id": pa.string(), "sample_index": pa.int64(), "key": pa.int64(), "trajectory": pa.binary()}
SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _TYPES.items()])


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


def write_snapshot(directory: Path, entries: Sequence[Entry], fingerprint: Fingerprint, step: int) -> None:
    """Replaces the snapshot in `directory` atomically and durably. A missing directory is created.

    Raises:
        CacheError: an OSError occurred (disk full, file size limit, read-only), or another process is writing to the
            directory. The old snapshot is then unchanged.
    """
    try:
        with _only_writer(directory):
            write_file(directory / SNAPSHOT, entries, fingerprint, compression="none")
    except OSError as error:
        raise CacheError(
            f"The trajectory cache ({len(entries)} entries) was not saved in '{directory}' at step {step}: "
            f"{error.strerror or error}. The last complete snapshot is intact. Free some space or "
            "lower rollout.cache.max_mb."
        ) from error


def write_file(path: Path, entries: Sequence[Entry], fingerprint: Fingerprint, compression: str) -> None:
    """Replaces a file of this format atomically and durably. Raises OSError, and leaves the old file then."""
    header = json.dumps({"format": FORMAT, **asdict(fingerprint)}).encode()
    rows = [(example_id, sample_index, key_of(blob), blob) for example_id, sample_index, blob in entries]
    schema = SCHEMA.with_metadata({HEADER: header, DIGEST: digest_of(header, rows)})
    with (
        replacing(path) as file,
        pq.ParquetWriter(file, schema, compression=compression, use_dictionary=False) as writer,
    ):
        for start in range(0, len(rows), ROWS_PER_GROUP):
            columns = zip(*rows[start : start + ROWS_PER_GROUP], strict=True)
            writer.write_table(pa.table([*map(list, columns)], schema=schema))


def digest_of(header: bytes, rows: Iterable[tuple[str, int, int, bytes]]) -> bytes:
    """The 16-byte BLAKE2b digest, in hex, of the header and of all rows in order."""
    digest = blake2b(header, digest_size=16)
    for example_id, sample_index, key, blob in rows:
        name = example_id.encode()
        digest.update(struct.pack("<qqqq", sample_index, key, len(name), len(blob)) + name + blob)
    return digest.hexdigest().encode()


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


def read_keys(path: Path) -> tuple[Fingerprint, list[int]]:
    """The fingerprint of a file of this format and the noise key of each row, which are not verified.

    Raises: as `read_file`.
    """
    with _opened(path) as (fingerprint, file):
        return fingerprint, file.read(columns=["key"])["key"].to_pylist()


def read_file(path: Path) -> tuple[Fingerprint, list[Entry]]:
    """The verified fingerprint and entries of a file of this format.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedError: nothing of it can be used.
        CacheError: the file cannot be used for another reason.
    """
    with _opened(path) as (fingerprint, file):
        groups = (file.read_row_group(group, use_threads=False) for group in range(file.num_row_groups))
        tables = (table.to_pydict().values() for table in groups)
        rows = [row for columns in tables for row in zip(*columns, strict=True)]
        metadata = file.metadata.metadata
        if metadata.get(DIGEST) != digest_of(metadata[HEADER], rows):
            raise DamagedError(f"'{path}' does not hold what was written: its digest is another")
    return fingerprint, [(example_id, sample_index, blob) for example_id, sample_index, _, blob in rows]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Fingerprint, pq.ParquetFile]]:
    """The fingerprint and the file. What a damaged page raises in the `with` block becomes a DamagedError."""
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
            yield _fingerprint(path, file), file
        except CacheError:
            raise
        except MemoryError as error:  # a sound file may need more than there is
            raise _unreadable(path, f"memory ran out ({error})") from error
        except Exception as error:  # the file may hold any bytes, and pyarrow raises many types of errors
            raise DamagedError(f"'{path}' cannot be read as a file of trajectories ({error})") from error


def _unreadable(path: Path, why: object) -> CacheError:
    return CacheError(
        f"The trajectory cache '{path}' cannot be read: {why}. Move it away to begin with an empty cache."
    )


def _fingerprint(path: Path, file: pq.ParquetFile) -> Fingerprint:
    """What the header says. Raises CacheError for another format, and any other exception for what is no header."""
    fields = read_json((file.metadata.metadata or {})[HEADER])
    if (number := fields.pop("format")) != FORMAT:
        raise CacheError(
            f"'{path}' is of trajectory cache format {number!r:.60}, and this is {FORMAT}: another version wrote it. "
            "Move the file away to begin with an empty cache."
        )
    if not file.schema_arrow.equals(SCHEMA):
        raise DamagedError(f"'{path}' does not have the columns of format {FORMAT}")
    return Fingerprint(**fields)
