"""Receipts: an 8-byte digest of every response of a run, from which its tokens can be checked later (specrl.verify).

`digests.jsonl` begins with a line about the run and has one line a rollout: {"step": N, "rows": [[example id, sample
index, visit, key, digest], ...]}, every row once. Lines are in the order of the steps.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from specrl.rollout.durable import read_json, write_durably
from specrl.rollout.types import CacheError, RolloutBatch, Row

DIGESTS = "digests.jsonl"
FORMAT = 2
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
    """The receipts of the rows."""
    columns = zip(rows, batch.sample_indices, batch.visits, batch.keys, batch.completions, strict=True)
    return [
        Receipt(row.example_id, sample_index, visit, key, digest(key, c.tokens, c.finish))
        for row, sample_index, visit, key, c in columns
    ]


class Receipts:
    """Appends the receipts of each rollout to the file of a run.

    A line that cannot be written is lost, and the file says nothing about its rollout. The first
    failure is logged.

    Args:
        run: the run's directory; None in the processes that do not write.
        about: the first line, JSON types.
        step: first step that will be added. Lines of later steps are removed, because these steps are repeated.
    """

    def __init__(self, run: Path | None, about: Mapping[str, Any], step: int):
        self._path = run and run / DIGESTS
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
        """Appends the line of one rollout."""
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
            if not self._warned:
                logger.warning(
                    "%s was not written at step %d: %s. The run goes on, and these responses cannot be verified.",
                    self._path,
                    step,
                    error.strerror or error,
                )
            self._warned = True


def read_receipts(run: Path) -> tuple[dict[str, Any], dict[int, list[Receipt]]]:
    """What the first line says about the run, and the receipts of each step.

    A line that is no JSON, as a crash may have cut it, is left out.

    Raises:
        FileNotFoundError: the run has none.
        CacheError: the first line is not that of this format, or a line or row is malformed.
    """
    path = run / DIGESTS
    first, *lines = path.read_bytes().split(b"\n")
    try:
        about = read_json(first)
    except ValueError:
        about = None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise CacheError(f"{path}, line 1: must be about the run, in format {FORMAT}, not {first[:60]!r}")
    steps: dict[int, list[Receipt]] = {}
    for number, line in enumerate(lines, 2):
        try:
            record = read_json(line)
        except ValueError:
            continue
        step, rows = _rollout(f"{path}, line {number}", record)
        steps[step] = rows
    return about, steps


def _rollout(where: str, record: Any) -> tuple[int, list[Receipt]]:
    """The step and the receipts of a line. Raises CacheError."""
    if not isinstance(record, dict) or type(record.get("step")) is not int or not isinstance(record.get("rows"), list):
        raise CacheError(f'{where}: must be {{"step": N, "rows": [...]}}, not {json.dumps(record)[:60]}')
    receipts = []
    for number, row in enumerate(record["rows"], 1):
        kinds = [type(value) for value in row] if isinstance(row, list) else []
        if kinds != [str, int, int, int, str]:
            raise CacheError(
                f"{where}, row {number}: must be [example id, sample index, visit, key, digest], not "
                f"{json.dumps(row)[:80]}"
            )
        receipts.append(Receipt(*row))
    return record["step"], receipts
