"""Drafts from the texts of a prompt: the slot's old one at its positions, else what continues the longest suffix."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from operator import eq

from rollout.config import SOURCES
from rollout.types import Request

_LENGTHS = (8, 4, 2)  # tokens of the suffixes that are looked up, longest first
_RECENT = 6  # positions over which a text that is being followed shows whether it still fits


class PromptTexts:
    """The texts of one prompt, stored ones and those in the making, and where each suffix was seen last.

    A table of n-grams of a few lengths: constant time for each token added and for each search, in a table that holds
    len(_LENGTHS) entries a token. It is built on the first search, so it does not travel to a worker.

    Args:
        stored: responses as token ids, the newest first.
        sources: of SOURCES, those that may be used.
    """

    def __init__(self, stored: Sequence[Sequence[int]] = (), sources: Collection[str] = SOURCES):
        self.sources = frozenset(sources)
        self.texts: list[Sequence[int]] = list(stored) if "earlier" in sources else []
        self.stored = len(self.texts)
        self._seen: dict[tuple[int, ...], tuple[int, int]] | None = None

    def open(self) -> int:
        """Begins a new text; returns its number."""
        self.texts.append([])
        return len(self.texts) - 1

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """Appends to a text that `open` began."""
        self.texts[text].extend(tokens)
        if self._seen is not None:
            self._index(text, len(self.texts[text]) - len(tokens))

    def find(self, tokens: Sequence[int]) -> tuple[int, int, int]:
        """What followed the longest suffix of `tokens`, most recently: (text, position, length of the suffix).

        The length is one of `_LENGTHS`, 0 when none was seen.
        """
        if self._seen is None:
            self._index_all()
        for length in _LENGTHS:
            if length <= len(tokens) and (found := self._seen.get(tuple(tokens[-length:]))):
                return *found, length
        return 0, 0, 0

    def _index_all(self) -> None:
        self._seen = {}
        for text in (*reversed(range(self.stored)), *range(self.stored, len(self.texts))):
            self._index(text, 0)

    def _index(self, text: int, first: int) -> None:
        """Notes what the tokens from `first` on follow. A suffix that nothing follows yet is no use."""
        start = max(0, first - _LENGTHS[0])
        tokens, seen = tuple(self.texts[text][start:]), self._seen
        for length in _LENGTHS:
            for at in range(max(first - start, length), len(tokens)):
                seen[tokens[at - length : at]] = text, start + at


class SuffixDrafter:
    """Follows a text while it fits, and leaves it for one that fits better.

    The slot's old text is followed first, at the same positions. After a mismatch it is followed further, as if one
    token had been replaced, unless a suffix of the response that is longer than what agreed of the last `_RECENT`
    positions was seen elsewhere: then that place is followed. Suffix matching is SuffixDecoding's (arXiv 2411.04975),
    the order of sources Hierarchy Drafting's (arXiv 2502.05609).

    Args:
        texts: of the prompt, shared by the rows of one engine call; what a row emits is added when it asks.
        own: the slot's old text; without one the newest stored text is followed first.
        ahead: what was rolled out ahead of the row, under its own noise; followed in the place of `own`.
    """

    def __init__(self, texts: PromptTexts, own: Sequence[int] | None = None, ahead: Sequence[int] | None = None):
        self.texts = texts
        self.source = "prefix" if ahead is None else "ahead"
        """Where the last draft came from."""
        self._followed, self._shift = own if "prefix" in texts.sources else None, 0
        if ahead is not None:
            self._followed = ahead
        elif own is None and texts.stored:
            self._followed, self.source = texts.texts[0], "earlier"
        self._row = texts.open() if "group" in texts.sources else None
        self._told = 0

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        if self._row is not None:
            self.texts.extend(self._row, tokens[self._told :])
            self._told = len(tokens)
        if not self._fits(tokens):
            self._realign(tokens)
        start = len(tokens) + self._shift
        return list(self._followed[start : start + limit]) if self._followed is not None else []

    def _fits(self, tokens: Sequence[int]) -> bool:
        """The text that is followed has the response's last token, and goes on."""
        at = len(tokens) + self._shift
        text = self._followed
        return text is not None and at < len(text) and (not tokens or text[at - 1] == tokens[-1])

    def _realign(self, tokens: Sequence[int]) -> None:
        """Follows what continues the longest suffix, if that is longer than the followed text agreed lately."""
        if self.source == "prefix":
            self.source = "position"
            if "position" not in self.texts.sources:
                self._followed = None
        text, at, length = self.texts.find(tokens)
        if length > self._agreement(tokens):
            self.source = "earlier" if text < self.texts.stored else "group"
            self._followed, self._shift = self.texts.texts[text], at - len(tokens)

    def _agreement(self, tokens: Sequence[int]) -> int:
        """Of the last positions, how many have the followed text's tokens; 0 when it has no more to offer."""
        text, n = self._followed, len(tokens)
        if text is None or n + self._shift >= len(text):
            return 0
        first = max(0, n - _RECENT, -self._shift)
        return sum(map(eq, tokens[first:], text[first + self._shift : n + self._shift]))


def following(request: Request, ahead: Sequence[int]) -> Request:
    """The request, its row following what was rolled out ahead of it."""
    texts = request.drafter.texts if isinstance(request.drafter, SuffixDrafter) else PromptTexts()
    return replace(request, drafter=SuffixDrafter(texts, ahead=ahead))
