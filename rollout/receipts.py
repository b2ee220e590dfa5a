"""Receipts: an 8-byte digest of every response of a run, from which its tokens can be checked later (specrl.verify).

`digests.jsonl` begins with a line about the run and has one line a rollout: {"step": N, "rows": [[example id, sample
index, visit, key, digest], ...]}. Lines are in the order of the steps.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

from specrl.rollout.durable import read_json, write_durably
from specrl.rollout.types import CacheError, RolloutBatch, Row

DIGESTS = "digests.jsonl"
FORMAT = 1
logger = logging.getLogger(__name__)


class Receipt(NamedTuple):
    """The digest of a response, and what its key derives from."""

    example_id: str
    sample_index: int
    visit: int
    key: int
    digest: str


def digest(key: int, tokens: Sequence[int], finish: str) -> str:
    """BLAKE2b-8 in hex of a response: key (int64) and tokens (int32), little-endian, then the finish reason."""
    text = struct.pack(f"<q{len(tokens)}i", key, *tokens) + finish.encode()
    return blake2b(text, digest_size=8).hexdigest()


def receipts_of(rows: Sequence[Row], batch: RolloutBatch) -> list[Receipt]:
    """The receipts of the rows that have a response."""
    columns = zip(rows, batch.sample_indices, batch.visits, batch.keys, batch.completions, strict=True)
    return [
        Receipt(row.example_id, sample_index, visit, key, digest(key, c.tokens, c.finish))
        for row, sample_index, visit, key, c in columns
        if not c.failure
    ]


class Receipts:
    """Appends the receipts of each rollout to the file of a run.

    A line that cannot be written is lost, and the file says nothing about its rollout. "stop" raises CacheError, "warn"
    logs the first one.

    Args:
        run: the run's directory; None in the processes that do not write.
        about: the first line, JSON types.
        step: first step that will be added. Lines of later steps are removed, because these steps are repeated.
    """

    def __init__(self, run: Path | None, about: Mapping[str, Any], step: int, on_write_error: Literal["warn", "stop"]):
        self._path = run and run / DIGESTS
        self._stop = on_write_error == "stop"
        self._torn = False
        self._warned = False
        if self._path is None:
            return
        lines: list[Any] = [{"format": FORMAT, **about}]
        if self._path.is_file():
            earlier = read_receipts(self._path.parent)[1]
            lines += [{"step": n, "rows": rows} for n, rows in earlier.items() if n < step]
        write_durably(self._path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def add(self, step: int, receipts: Sequence[Receipt]) -> None:
        """Appends the line of one rollout. Raises CacheError, see above."""
        if self._path is None:
            return
        line = json.dumps({"step": step, "rows": receipts}) + "\n"
        try:
            with self._path.open("ab") as file:
                file.write(b"\n" * self._torn + line.encode())
                file.flush()
                os.fsync(file.fileno())
            self._torn = False
        except OSError as error:
            self._torn = True
            text = f"{self._path} was not written at step {step}: {error.strerror or error}"
            if self._stop:
                raise CacheError(f"{text}. rollout.cache.on_write_error=warn trains on without it.") from error
            if not self._warned:
                logger.warning("%s. The run goes on, and these responses cannot be verified.", text)
            self._warned = True


def read_receipts(run: Path) -> tuple[dict[str, Any], dict[int, list[Receipt]]]:
    """What the first line says about the run, and the receipts of each step. Unreadable lines, such as one that a crash
    cut, are left out.

    Raises:
        FileNotFoundError: the run has none.
    """
    about: dict[str, Any] = {}
    steps: dict[int, list[Receipt]] = {}
    for line in (run / DIGESTS).read_bytes().splitlines():
        try:
            record = read_json(line)
            if "format" in record:
                about = record
            else:
                steps[record["step"]] = [Receipt(*row) for row in record["rows"]]
        except (ValueError, TypeError, KeyError):
            continue
    return about, steps
