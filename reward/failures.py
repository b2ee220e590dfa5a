"""Rows without a score: whose doing it was, and when there are too many of them."""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reward.base import Outcome, Sample

WINDOW_PROMPTS = 100  # the rows of a prompt fail together, so prompts are what a share is measured over
WINDOW_BATCHES = 4
FEW_ROWS = 16  # fewer than this that all fail may be chance


class LimitError(RuntimeError):
    """A text reached the time or memory limit of a worker.

    `of_text` says that the same workers answered another text in time afterwards: it was this text's own doing. Until
    then it may be the workers, the machine or what the reward asks.
    """

    of_text = False


def of_text(outcome: Outcome) -> bool:
    """Whether a row has no score because its text takes more than a worker may use."""
    return isinstance(outcome, LimitError) and outcome.of_text


def kind(outcome: Outcome) -> str:
    """Why a row has no score: "missing", "timeout" or "error"."""
    if outcome is None:
        return "missing"
    return "timeout" if isinstance(outcome, TimeoutError) else "error"


def describe(sample: Sample, outcome: Outcome) -> str:
    """The row and what happened, with its traceback."""
    where = (
        f"prompt {sample.prompt[-80:]!r}, completion ending {sample.completion[-80:]!r}, answer {sample.answer!r:.80}"
    )
    if outcome is None:
        return f"{where}: the reward returned None (no score)"
    return f"{where}:\n{''.join(traceback.format_exception(outcome)).rstrip()}"


@dataclass(frozen=True)
class _Batch:
    rows: int
    scored: int
    prompts: int
    failed: int  # rows without a score that is not their text's own doing
    failed_prompts: frozenset[str]
    kinds: Counter[str]
    first: str

    @classmethod
    def of(cls, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> _Batch:
        lost = [(s, o) for s, o in zip(samples, outcomes, strict=True) if not isinstance(o, float)]
        failed = [(sample, outcome) for sample, outcome in lost if not of_text(outcome)]
        return cls(
            rows=len(samples),
            scored=len(samples) - len(lost),
            prompts=len({sample.prompt for sample in samples}),
            failed=len(failed),
            failed_prompts=frozenset(sample.prompt for sample, _ in failed),
            kinds=Counter("over a limit" if of_text(outcome) else kind(outcome) for _, outcome in lost),
            first=describe(*(failed or lost)[0]) if lost else "",
        )


class Failures:
    """Judges one reward over its latest batches: at least 4, with at least 100 prompts (in two batches one is two).

    It is broken when

    - more than `ratio` of the rows failed, in more than one batch and for more than one prompt: neither a bad step nor
      a poisoned prompt decides. A window that is not full yet is judged as if the rest of it went well;
    - the latest batches have no score at all: 16 failed rows and more than one prompt of them;
    - a full window has no score at all, whatever the reason.

    A row that is over a limit by its text's own doing is no failure. With `ratio` 0 the first failure decides, with 1
    nothing does.
    """

    def __init__(self, ratio: float):
        self.ratio = ratio
        self._batches: deque[_Batch] = deque()

    def add(self, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> None:
        """Take in one batch; what the window can do without leaves it."""
        if not samples:
            return
        self._batches.append(_Batch.of(samples, outcomes))
        while len(self._batches) > WINDOW_BATCHES and self._prompts - self._batches[0].prompts >= WINDOW_PROMPTS:
            self._batches.popleft()

    @property
    def _prompts(self) -> int:
        return sum(batch.prompts for batch in self._batches)

    def broken(self) -> tuple[str, str] | None:
        """How many rows of how many, and the first failure; None when there are not too many."""
        failed = sum(batch.failed for batch in self._batches)
        if not self._too_many(failed):
            return None
        rows, scored = (sum(getattr(batch, key) for batch in self._batches) for key in ("rows", "scored"))
        kinds = ", ".join(f"{count} {kind}" for kind, count in sum((b.kinds for b in self._batches), Counter()).items())
        first = next(batch.first for batch in self._batches if batch.failed or (not failed and batch.first))
        return f"{failed or rows - scored} of the last {rows} rows ({kinds})", first

    def _too_many(self, failed: int) -> bool:
        if self.ratio <= 0 or self.ratio >= 1:
            return self.ratio <= 0 < failed
        return self._nothing_scored() or self._above_the_ratio(failed)

    def _nothing_scored(self) -> bool:
        latest = list(takewhile(lambda batch: not batch.scored, reversed(self._batches)))
        full = len(latest) >= WINDOW_BATCHES and sum(batch.prompts for batch in latest) >= WINDOW_PROMPTS
        groups = sum(len(batch.failed_prompts) for batch in latest)
        return full or (groups > 1 and sum(batch.failed for batch in latest) >= FEW_ROWS)

    def _above_the_ratio(self, failed: int) -> bool:
        failing = [batch.failed_prompts for batch in self._batches if batch.failed]
        rows = sum(batch.rows for batch in self._batches)
        in_full = rows * max(1.0, WINDOW_PROMPTS / max(1, self._prompts))
        return len(failing) > 1 and len(frozenset().union(*failing)) > 1 and failed > max(1.0, self.ratio * in_full)
