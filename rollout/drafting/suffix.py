"""Drafts from the texts of a prompt: the slot's old one at its positions, else what continues the longest suffix."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from operator import eq
from typing import Any

from rollout.drafting.ngrams import LENGTHS, NGrams, Piece, Place, append, token_ids
from rollout.sections import SOURCES
from rollout.types import Request

_RECENT = 6  # positions over which a text that is being followed shows whether it still fits


class PromptTexts:
    """The texts of one prompt, stored ones and those in the making, and where each suffix was seen last.

    Prompts that are searched together share an index, which is built and brought up to date by the searches. So it does
    not travel to a worker.

    Args:
        stored: responses as token ids, the newest first.
        sources: of SOURCES, those that may be used.
    """

    def __init__(self, stored: Sequence[Sequence[int]] = (), sources: Collection[str] = SOURCES):
        self.sources = frozenset(sources)
        self.texts = [token_ids(text) for text in stored] if "earlier" in sources else []
        self.stored = len(self.texts)
        self._forget()

    def _forget(self) -> None:
        self.index: NGrams | None = None
        self.group = 0
        """The prompt's number in the index."""
        self._indexed: list[int] = []  # tokens of each text that the index holds

    def __getstate__(self) -> dict[str, Any]:
        return {"sources": self.sources, "texts": self.texts, "stored": self.stored}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def open(self) -> array[int]:
        """Begins a new text, which grows as its ids are appended."""
        self.texts.append(array("I"))
        return self.texts[-1]

    def join(self, index: NGrams) -> None:
        """Searches go to that index from now on."""
        self.index, self.group, self._indexed = index, index.group(), []

    def unindexed(self) -> Iterator[Piece]:
        """What the index lacks, the most recent last; it is taken to be added now."""
        known = self._indexed
        order = [*range(self.stored, len(self.texts))]
        if not known:
            order[:0] = reversed(range(self.stored))
        known += [0] * (len(self.texts) - len(known))
        for i in order:
            text, before = self.texts[i], known[i]
            if len(text) > before:
                known[i] = len(text)
                yield self.group, i, text, before


def find(prompts: Sequence[PromptTexts], texts: Sequence[Sequence[int]]) -> list[Place]:
    """What followed the longest suffix of each text among those of its prompt: see `NGrams.find`."""
    asked = dict.fromkeys(prompts)
    _join([prompt for prompt in asked if prompt.index is None], [prompt.index for prompt in asked if prompt.index])
    found: dict[int, Place] = {}
    for index in dict.fromkeys(prompt.index for prompt in asked):
        if lacking := [piece for prompt in asked if prompt.index is index for piece in prompt.unindexed()]:
            index.add(lacking)
        rows = [i for i, prompt in enumerate(prompts) if prompt.index is index]
        suffixes = [texts[i][-LENGTHS[0] :] for i in rows]
        found |= zip(rows, index.find([prompts[i].group for i in rows], suffixes), strict=True)
    return [found[i] for i in range(len(prompts))]


def _join(new: Sequence[PromptTexts], indices: Sequence[NGrams]) -> None:
    """Gives the prompts one of the indices, or one of their own; their rows may write as much as was stored."""
    tokens = 2 * sum(len(text) for prompt in new for text in prompt.texts)
    index = next((index for index in indices if not index.full), None)
    for prompt in new:
        if index is None or index.full:
            index = NGrams(tokens)
        prompt.join(index)


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
        self._followed, self._shift = None, 0
        if ahead is not None:
            self._followed = token_ids(ahead)
        elif own is None and texts.stored:
            self._followed, self.source = texts.texts[0], "earlier"
        elif own is not None and "prefix" in texts.sources:
            own = token_ids(own)
            self._followed = next((text for text in texts.texts[: texts.stored] if text == own), own)  # travels once
        self._told = texts.open() if "group" in texts.sources else None

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        return propose([self], [tokens], [limit])[0].tolist()

    def tell(self, tokens: Sequence[int]) -> bool:
        """Adds what the response has grown by to the texts; whether the text that is followed fits, and goes on."""
        n = len(tokens)
        if self._told is not None and n > (told := len(self._told)):
            append(self._told, tokens[told:])
        at, text = n + self._shift, self._followed
        return text is not None and at < len(text) and (not n or text[at - 1] == tokens[-1])

    def turn(self, tokens: Sequence[int], text: int, at: int, length: int) -> None:
        """Follows the text from position `at` on if a longer suffix stands before it than the followed one agreed in.

        Args: length: of the suffix of `tokens` that ends there.
        """
        if self.source == "prefix":
            self.source = "position"
            if "position" not in self.texts.sources:
                self._followed = None
        if length > self._agreement(tokens):
            self.source = "earlier" if text < self.texts.stored else "group"
            self._followed, self._shift = self.texts.texts[text], at - len(tokens)

    def ahead(self, length: int, limit: int) -> array[int]:
        """At most `limit` tokens that follow the first `length` in the text that is followed."""
        start = length + self._shift
        return array("I") if self._followed is None else self._followed[start : start + limit]

    def _agreement(self, tokens: Sequence[int]) -> int:
        """Of the last positions, how many have the followed text's tokens; 0 when it has no more to offer."""
        text, n = self._followed, len(tokens)
        if text is None or n + self._shift >= len(text):
            return 0
        first = max(0, n - _RECENT, -self._shift)
        return sum(map(eq, tokens[first:], text[first + self._shift : n + self._shift]))


def propose(
    drafters: Sequence[SuffixDrafter], texts: Sequence[Sequence[int]], limits: Sequence[int]
) -> list[array[int]]:
    """What `SuffixDrafter.propose` gives for each row, all asked together; without a limit nothing is searched."""
    fits = [drafter.tell(tokens) for drafter, tokens in zip(drafters, texts, strict=True)]
    astray = [i for i, (fit, limit) in enumerate(zip(fits, limits, strict=True)) if limit and not fit]
    if astray:
        places = find([drafters[i].texts for i in astray], [texts[i] for i in astray])
        for i, place in zip(astray, places, strict=True):
            drafters[i].turn(texts[i], *place)
    return [drafter.ahead(len(tokens), limit) for drafter, tokens, limit in zip(drafters, texts, limits, strict=True)]


def following(request: Request, ahead: Sequence[int]) -> Request:
    """The request, its row following what was rolled out ahead of it."""
    texts = request.drafter.texts if isinstance(request.drafter, SuffixDrafter) else PromptTexts()
    return replace(request, drafter=SuffixDrafter(texts, ahead=ahead))
