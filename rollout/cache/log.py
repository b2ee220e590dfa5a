"""The log of a run: every response by its noise key, one file a rollout, and another run that drafts from it.

A run with the same seed has the same keys. Where its settings are almost the same, so are its texts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from specrl.rollout.cache.memory import differences
from specrl.rollout.cache.record import pack, unpack
from specrl.rollout.cache.snapshot import Fingerprint, read_file, read_keys, write_file
from specrl.rollout.reduction import Metric, highest
from specrl.rollout.sections import CacheConfig
from specrl.rollout.types import CacheError, Trajectory

TEXTS = "texts"
"""Directory of a run with the files of its log."""
logger = logging.getLogger(__name__)

Response = tuple[str, int, Trajectory]
"""(example id, sample index, response)."""


class ResponseLog:
    """Writes the responses of each rollout to `RUN/texts/step_N.parquet`.

    A file that cannot be written is counted. "stop" raises CacheError; "warn" logs the first one after each file that
    was written.

    Args:
        run: the run's directory; None in the processes that do not write.
        fingerprint: identity of the texts, with the seed that their keys derive from.
    """

    def __init__(self, run: Path | None, fingerprint: Fingerprint):
        self._folder = run and run / TEXTS
        self._fingerprint = fingerprint
        self._lost = 0
        self._bytes = 0
        self._warned = False

    def add(self, step: int, responses: list[Response]) -> None:
        """Writes the responses of one rollout, which are on disk when this returns."""
        if self._folder is None:
            return
        entries = [(example_id, sample_index, pack(response)) for example_id, sample_index, response in responses]
        path = self._folder / f"step_{step}.parquet"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(path, entries, self._fingerprint, compression="zstd")
            self._bytes += path.stat().st_size
            self._warned = False
        except OSError as error:
            self._lost += 1
            if not self._warned:
                logger.warning(
                    "The log of responses was not written: %s: %s. Free some space, or leave out rollout.cache.log. "
                    "The run goes on.",
                    path,
                    error.strerror or error,
                )
            self._warned = True

    def stats(self) -> dict[str, Metric]:
        """Size of what was written so far, and rollouts that are not in the log."""
        return {"cache/log_mb": highest(self._bytes / 2**20), "cache/log_lost": highest(self._lost)}


def open_log(
    run: Path,
    other: Path | None,
    options: CacheConfig,
    fingerprint: Fingerprint,
    *,
    writes: bool,
) -> tuple[ResponseLog | None, Twin | None]:
    """The log of a run's responses, and the runs that it drafts from: its own earlier part, and `other`.

    Args: writes: whether this process is the one that writes.

    Raises:
        CacheError: `other` has no texts that fit.
    """
    log = None
    if options.log:
        log = ResponseLog(run if writes else None, fingerprint)
    own = [run] if options.log else []
    twin = Twin([*own, *([other] if other else [])], fingerprint)
    if other:
        twin.check(other)
    return log, None if twin.is_empty else twin


class Twin:
    """The responses of other runs, or of an earlier part of this one, by key. They are drafts and decide no token.

    A damaged file, or one of another tokenizer, data set or seed, is left out and counted. Files are read when one of
    their keys is asked for.

    Args:
        runs: directories of runs; an earlier one is preferred.
        fingerprint: identity of this run's texts, with its seed.
    """

    def __init__(self, runs: Sequence[Path], fingerprint: Fingerprint):
        self._fingerprint = fingerprint
        self.left_out = 0
        """Files that were left out."""
        self._files: dict[int, Path] = {}  # by key
        self._texts: dict[int, Trajectory] = {}
        self._differences: dict[str, None] = {}
        for path in (path for run in runs for path in sorted((run / TEXTS).glob("step_*.parquet"))):
            for key in self._keys(path):
                self._files.setdefault(key, path)

    def check(self, run: Path) -> None:
        """Raises CacheError if `run` keeps no texts, or none that fit. Damaged ones cost time only."""
        if self._differences and not self._files:
            raise CacheError(
                f"rollout.twin={run}: its texts have other keys or tokens: {'; '.join(self._differences)}. Set "
                "the same seed, tokenizer, template and data, or leave rollout.twin out."
            )
        if not self._files and not self.left_out:
            raise CacheError(
                f"rollout.twin={run} has no texts to draft from. A run writes them with rollout.cache.log=true; "
                f"rollout.cache.start_from={run / 'trajectories'} drafts from its last responses."
            )

    def _keys(self, path: Path) -> list[int]:
        """The keys of a file; none if it is left out."""
        try:
            fingerprint, keys = read_keys(path)
        except (OSError, CacheError) as error:
            self._leave_out(path, error)
            return []
        if unlike := differences(self._fingerprint.identity, fingerprint.identity):
            self._differences |= dict.fromkeys(unlike)
            self._leave_out(path, "; ".join(unlike))
            return []
        return keys

    def _leave_out(self, path: Path, error: object) -> None:
        self.left_out += 1
        logger.warning("%s is left out, so its rows are generated without it: %s", path, error)

    @property
    def is_empty(self) -> bool:
        """Whether there is no text, and no file was left out."""
        return not self._files and not self.left_out

    def stats(self) -> dict[str, Metric]:
        """Files that were left out; every process reads the same ones."""
        return {"cache/twin_left_out": highest(self.left_out)}

    def texts(self, keys: Sequence[int]) -> dict[int, Trajectory]:
        """The responses with these keys, as far as there are any. Those that were asked for before are forgotten."""
        self._texts = {key: self._texts[key] for key in keys if key in self._texts}
        wanted = {key for key in keys if key not in self._texts}
        for path in {self._files[key] for key in wanted if key in self._files}:
            self._read(path, wanted)
        return self._texts

    def _read(self, path: Path, wanted: set[int]) -> None:
        try:
            entries = read_file(path)[1]
        except (OSError, CacheError) as error:
            self._files = {key: file for key, file in self._files.items() if file != path}
            self._leave_out(path, error)
            return
        for text in (unpack(blob) for _, _, blob in entries):
            if text.key in wanted:
                self._texts[text.key] = text
