"""Scores of texts that come again. A response that stayed the same keeps its reward, when the reward says it may."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

from specrl.reward.base import Outcome, Sample

ROWS = 200_000  # about 30 MB


class Memo:
    """The latest scores of one deterministic reward, by everything that the reward sees.

    Only scores are kept. A failure is asked for again, as it says nothing about the text.
    """

    def __init__(self, rows: int = ROWS):
        self._rows = rows
        self._scores: OrderedDict[bytes, float] = OrderedDict()  # least recently used first

    def outcomes(
        self, samples: Sequence[Sample], ask: Callable[[list[Sample]], list[Outcome]]
    ) -> tuple[list[Outcome], int]:
        """What `ask` says of the samples, in order, and how many of them it was not asked about."""
        marks = [digest(sample) for sample in samples]
        found: list[Outcome] = [self._scores.get(mark) for mark in marks]
        new = [i for i, score in enumerate(found) if score is None]
        for i, outcome in zip(new, ask([samples[i] for i in new]) if new else [], strict=True):
            found[i] = outcome
        for mark, outcome in zip(marks, found, strict=True):
            if mark is not None and isinstance(outcome, float):
                self._scores[mark] = outcome
                self._scores.move_to_end(mark)
        while len(self._scores) > self._rows:
            self._scores.popitem(last=False)
        return found, len(samples) - len(new)


def digest(sample: Sample) -> bytes | None:
    """16 bytes that identify a sample: everything that a reward sees of it. None when JSON cannot carry a field."""
    seen = [sample.prompt, sample.completion, sample.answer, sample.fields, sample.messages]
    try:
        return blake2b(json.dumps(seen, sort_keys=True).encode(), digest_size=16).digest()
    except (TypeError, ValueError):
        return None
