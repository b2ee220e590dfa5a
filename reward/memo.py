"""Reuse of scores: a text that a deterministic reward has scored before keeps its score."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

from specrl.reward.base import Outcome, Sample

MAX_ROWS = 200_000  # about 30 MB


class Memo:
    """The latest scores of one deterministic reward, by a digest of everything that the reward sees.

    Only scores are kept. A sample that failed is scored again, as a failure says nothing about the text.
    """

    def __init__(self, max_rows: int = MAX_ROWS):
        self._max_rows = max_rows
        self._scores: OrderedDict[bytes, float] = OrderedDict()  # least recently used first

    def outcomes(
        self, samples: Sequence[Sample], score: Callable[[list[Sample]], list[Outcome]]
    ) -> tuple[list[Outcome], int]:
        """Outcomes in the order of the samples, and how many were reused; `score` is called with the others."""
        digests = [digest(sample) for sample in samples]
        outcomes: list[Outcome] = [self._scores.get(key) if key else None for key in digests]
        new = [i for i, outcome in enumerate(outcomes) if outcome is None]
        if new:
            for i, outcome in zip(new, score([samples[i] for i in new]), strict=True):
                outcomes[i] = outcome
        for key, outcome in zip(digests, outcomes, strict=True):
            if key is not None and isinstance(outcome, float):
                self._scores[key] = outcome
                self._scores.move_to_end(key)
        while len(self._scores) > self._max_rows:
            self._scores.popitem(last=False)
        return outcomes, len(samples) - len(new)


def digest(sample: Sample) -> bytes | None:
    """A 16-byte digest of everything that a reward sees of the sample; None if JSON cannot represent a field."""
    content = [sample.prompt, sample.completion, sample.answer, sample.fields, sample.messages]
    try:
        return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).digest()
    except (TypeError, ValueError):
        return None
