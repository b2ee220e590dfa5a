"""Drafts from the prompt's old trajectories: the rest of the slot's own text, re-matched where positions shifted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class PriorDrafter:
    """Continues an old trajectory of the prompt at the same positions; after a mismatch looks for a better place.

    After a mismatch the last `rematch` response tokens (twice as many first) are searched in the slot's own old
    trajectory, then in its siblings, newest first; within a text the occurrence nearest to the current position wins.
    Without an occurrence the current text goes on at the same positions, as if one token had been replaced.

    Args:
        sources: old responses of this prompt as token ids, the slot's own first; at least one.
        rematch: tokens that must agree; 0 never leaves the first source and its positions.
    """

    def __init__(self, sources: Sequence[Sequence[int]], rematch: int = 4):
        self._sources, self._rematch = sources, rematch
        self._bytes: list[bytes] = []  # of the sources, made when first needed
        self._source, self._shift = 0, 0

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        n = len(tokens)
        if n and not self._follows(n, tokens[-1]):
            self._realign(tokens)
        start = n + self._shift
        return list(self._sources[self._source][start : start + limit])

    def _follows(self, n: int, last: int) -> bool:
        at, source = n - 1 + self._shift, self._sources[self._source]
        return at < len(source) and source[at] == last

    def _realign(self, tokens: Sequence[int]) -> None:
        n = len(tokens)
        self._bytes = self._bytes or [array("i", source).tobytes() for source in self._sources]
        for length in (2 * self._rematch, self._rematch):
            if not 0 < length <= n:
                continue
            needle = array("i", tokens[-length:]).tobytes()
            for i, text in enumerate(self._bytes):
                if found := _occurrences(text, needle):
                    end = min(found, key=lambda at: abs(at + length - n)) + length
                    if end < len(self._sources[i]):
                        self._source, self._shift = i, end - n
                        return


def _occurrences(text: bytes, needle: bytes) -> list[int]:
    """Token positions of `needle` in `text`, both int32 bytes."""
    found, at = [], text.find(needle)
    while at >= 0:
        if at % 4 == 0:
            found.append(at // 4)
        at = text.find(needle, at + 1)
    return found
