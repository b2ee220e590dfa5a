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
        self._scores: OrderedDict[bytes | int, float] = OrderedDict()  # least recently used first

    def outcomes(
        self, samples: Sequence[Sample], score: Callable[[list[Sample]], list[Outcome]]
    ) -> tuple[list[Outcome], int]:
        """Outcomes in the order of the samples, and how many were reused; `score` is called once for equal ones."""
        keys = [digest(sample) or number for number, sample in enumerate(samples)]
        new = {key: sample for key, sample in zip(keys, samples, strict=True) if key not in self._scores}
        found = dict(zip(new, score([*new.values()]) if new else (), strict=True))
        outcomes = [found[key] if key in found else self._scores[key] for key in keys]
        for key, outcome in zip(keys, outcomes, strict=True):
            if isinstance(key, bytes) and isinstance(outcome, float):
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
