"""The ids that a run's texts use most: a draft model need not propose others (VocabTrim, arXiv 2506.22694)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

FREQUENT_IDS = 32_768
"""Ids that a draft model may propose."""


class Frequent:
    """Which ids a run's texts use most.

    Args:
        vocab: ids that there are.
        first: ids that come before all others.
    """

    def __init__(self, vocab: int, first: Collection[int]):
        self._counts = np.zeros(vocab, np.int64)
        self._counts[[*first]] = 2**62

    def learn(self, texts: Iterable[Sequence[int]]) -> None:
        for text in texts:
            np.add.at(self._counts, np.asarray(text, np.int64), 1)

    def most(self, size: int) -> np.ndarray:
        """The `size` most frequent ids, ascending; of equals the lower, as tokenizers number what is frequent first."""
        return np.sort(np.argsort(-self._counts, kind="stable")[:size])
