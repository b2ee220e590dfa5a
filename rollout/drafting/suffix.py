"""Drafts from the texts of a prompt: the sample's old text at equal positions, or what followed the last tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import eq
from typing import Any

from specrl.rollout.drafting.cost import prior
from specrl.rollout.drafting.ngrams import LENGTHS, NGrams, Occurrence, Piece, append, token_ids
from specrl.rollout.sections import SOURCES
from specrl.rollout.types import Request

_RECENT = 6  # tokens of the response by which a text that is followed is compared with it
_LONGEST = 32  # matching tokens; more add no evidence
_LEVELS = [0, 1, 2, 3, 4, 4, 6, 6, *[8] * 8, *[16] * 16, _LONGEST]  # match quality by the number of matching tokens
_MATCHING = [(level, False) for level in _LEVELS]
_SEARCHED = "group", "earlier", "prompt"  # each source is a group of its own in an index

MatchQuality = tuple[int, bool]
"""Evidence that a text will keep matching. First the number of the response's last tokens that precede the position in
the text, as one of `_LEVELS`; or, negative, how many of the last `_RECENT` tokens differ; 0 without evidence. Then
whether the row is lost: its last pass emitted one token, which is not the text's."""
Worth = Callable[[tuple[MatchQuality, str]], float]
"""Acceptance of drafts by their match quality and source."""
Match = tuple[int, int, "array[int]", int, str]
"""A text that may be followed: (match level, where in the response the match begins, text, position in the text less
position in the response, source)"""


def unseen(bucket: tuple[MatchQuality, str]) -> float:
    """The `Worth` before any draft was seen."""
    (match, _), source = bucket
    return prior(match, source)


class PromptTexts:
    """The texts of one prompt: stored responses, the prompt, and responses that are being generated.

    Prompts that are searched together share an index of n-grams, which searches build and update. It is not sent to
    workers.

    Args:
        stored: responses as token ids, the newest first.
        sources: of SOURCES, those that may be used.
        prompt: its token ids.
    """

    def __init__(
        self,
        stored: Sequence[Sequence[int]] = (),
        sources: Collection[str] = SOURCES,
        prompt: Sequence[int] = (),
    ):
        self.sources = frozenset(sources)
        self.texts = [token_ids(text) for text in stored] if "earlier" in sources else []
        self.stored = len(self.texts)
        self.texts += [token_ids(prompt)] if prompt and "prompt" in sources else []
        self.known = len(self.texts)
        self._reset_index()

    def _reset_index(self) -> None:
        self.index: NGrams | None = None
        self.groups: dict[str, int] = {}
        """The number of each source in the index; sources are searched separately."""
        self._indexed: list[int] = []  # tokens of each text that the index holds

    def source(self, text: int) -> str:
        """Where a text comes from."""
        return "earlier" if text < self.stored else "prompt" if text < self.known else "group"

    def __getstate__(self) -> dict[str, Any]:
        return {"sources": self.sources, "texts": self.texts, "stored": self.stored, "known": self.known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_index()

    def open(self) -> array[int]:
        """Begins a new text, to which ids are appended."""
        self.texts.append(array("I"))
        return self.texts[-1]

    def join(self, index: NGrams) -> None:
        """Uses that index for searches from now on."""
        self._reset_index()
        self.index = index
        sources = {self.source(text) for text in range(self.known)} | ({"group"} & self.sources)
        self.groups = {source: index.group() for source in _SEARCHED if source in sources}

    def unindexed(self) -> Iterator[Piece]:
        """The pieces that the index lacks, the most recent last; the caller adds them."""
        known = self._indexed
        order = [*range(self.known, len(self.texts))]
        if not known:
            order[:0] = reversed(range(self.known))
        known += [0] * (len(self.texts) - len(known))
        for i in order:
            text, before = self.texts[i], known[i]
            if len(text) > before:
                known[i] = len(text)
                yield self.groups[self.source(i)], i, text, before


def find(prompts: Sequence[PromptTexts], texts: Sequence[Sequence[int]]) -> list[list[Occurrence]]:
    """Where the longest suffix of each text occurred last, for each source of its prompt: see `NGrams.find`."""
    distinct = dict.fromkeys(prompts)
    _join([prompt for prompt in distinct if prompt.index is None], [p.index for p in distinct if p.index])
    occurrences: list[list[Occurrence]] = [[] for _ in prompts]
    for index in dict.fromkeys(prompt.index for prompt in distinct if prompt.index):
        if pieces := [piece for prompt in distinct if prompt.index is index for piece in prompt.unindexed()]:
            index.add(pieces)
        rows = [i for i, prompt in enumerate(prompts) if prompt.index is index]
        groups = [prompts[i].groups.values() for i in rows]
        row_of_group = [k for k, several in enumerate(groups) for _ in several]
        suffixes = [texts[i][-LENGTHS[0] :] for i in rows]
        for k, occurrence in zip(
            row_of_group, index.find([*chain.from_iterable(groups)], suffixes, row_of_group), strict=True
        ):
            if occurrence[2]:
                occurrences[rows[k]].append(occurrence)
    return occurrences


def _join(new: Sequence[PromptTexts], indices: Sequence[NGrams]) -> None:
    """Gives each prompt one of the indices, or a new one; rows may generate as much as was stored."""
    tokens = 2 * sum(len(text) for prompt in new for text in prompt.texts)
    most = len(_SEARCHED)  # groups of a prompt, all in one index
    index = next((index for index in indices if index.takes(most)), None)
    for prompt in new:
        if index is None or not index.takes(most):
            index = NGrams(tokens)
        prompt.join(index)


class SuffixDrafter:
    """Follows a text while it matches, and switches to one that promises more after a mismatch.

    The sample's old text is followed first, at equal positions. After a mismatch it is followed further, as if one
    token had been replaced, or another occurrence of the response's last tokens is: in an old text, in the prompt, in
    what the prompt's rows have emitted. The one whose source and match quality had the highest acceptance is chosen.
    Suffix matching is SuffixDecoding's (arXiv 2411.04975), longer matches before shorter ones SAM decoding's
    (arXiv 2411.10666), several sources Hierarchy Drafting's (arXiv 2502.05609), and the choice by past acceptance is
    TAGE branch prediction's, as in `ContextTable`.

    Args:
        texts: of the prompt, shared by the rows of one engine call; what a row emits is added when it is asked.
        old: the sample's old text; without one the newest stored text is followed first.
        ahead: what was rolled out ahead of the row, under its own noise; followed instead of `old`.
    """

    def __init__(self, texts: PromptTexts, old: Sequence[int] | None = None, ahead: Sequence[int] | None = None):
        self.texts = texts
        self._first: tuple[array[int] | None, str] = None, "prefix" if ahead is None else "ahead"
        if ahead is not None:
            self._first = token_ids(ahead), "ahead"
        elif old is None and texts.stored:
            self._first = texts.texts[0], "earlier"
        elif old is not None and "prefix" in texts.sources:
            ids = token_ids(old)
            self._first = next((text for text in texts.texts[: texts.stored] if text == ids), ids), "prefix"
        self._begin()

    def _begin(self) -> None:
        """A response begins."""
        self._followed, self.source = self._first
        """The text that is followed, and where the last draft came from."""
        self._shift = 0  # position in that text less position in the response
        self.quality: MatchQuality = 0, False
        """Of that draft."""
        self._matches_from = 0  # position of the response from which on it equals the text that is followed
        self._left: tuple[array[int], int, str] | None = None  # the text followed before, with its shift and source
        self._length = 0  # of the response when it was last observed
        self._grown = 0  # by how much it had grown then
        self._text = self.texts.open() if "group" in self.texts.sources else None  # the response, among the texts

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        return propose([self], [tokens], [limit])[0].tolist()

    def observe(self, tokens: Sequence[int]) -> bool:
        """Adds the new tokens of the response to the texts; whether the text that is followed matches, and goes on.

        A response that is shorter than before is a new one, and a new text.
        """
        n = len(tokens)
        if n < self._length:  # its request is run again
            self._begin()
        if self._text is not None and n > (known := len(self._text)):
            append(self._text, list(tokens[known:]))
        text = self._followed
        position = n + self._shift
        if text is None or position >= len(text) or (n and text[position - 1] != tokens[-1]):
            self._grown = n - self._length
            self._length = n
            return False
        matching = n - self._matches_from
        self._length = n
        self.quality = _MATCHING[matching if matching < _LONGEST else _LONGEST]
        return True

    def switch_source(self, tokens: Sequence[int], occurrences: Sequence[Occurrence], worth: Worth) -> None:
        """Follows the best match: the present text, the one before, or one of the occurrences.

        Args: occurrences: of the response's last tokens.
        """
        if self.source == "prefix":
            self.source = "position"
            if "position" not in self.texts.sources:
                self._followed = None
        n = len(tokens)
        lost = self._grown <= 1
        best, chosen = -1.0, None
        for match in self._matches(tokens, occurrences):
            if (acceptance := worth(((match[0], lost), match[-1]))) > best:
                best, chosen = acceptance, match
        if chosen is None:
            return
        level, self._matches_from, text, shift, source = chosen
        self.quality = level, lost
        if text is not self._followed or shift != self._shift:
            if self._followed is not None and n + self._shift < len(self._followed):
                self._left = self._followed, self._shift, self.source
            self._followed, self._shift, self.source = text, shift, source

    def _matches(self, tokens: Sequence[int], occurrences: Sequence[Occurrence]) -> list[Match]:
        n, followed = len(tokens), self._followed
        matches = []
        if followed is not None and n + self._shift < len(followed):
            matches.append((-_differing(followed, self._shift, tokens), n, followed, self._shift, self.source))
        if self._left and n + self._left[1] < len(self._left[0]):
            text, shift, source = self._left
            matches.append((-_differing(text, shift, tokens), n, text, shift, source))
        for number, position, length in occurrences:
            text = self.texts.texts[number]
            if text is not followed or position - n != self._shift:
                length = _preceding(text, position, tokens, length)
                matches.append((_LEVELS[length], n - length, text, position - n, self.texts.source(number)))
        return matches

    def continuation(self, length: int, limit: int) -> array[int]:
        """At most `limit` tokens of the text that is followed, after the response's first `length`."""
        start = length + self._shift
        return array("I") if self._followed is None else self._followed[start : start + limit]


def _differing(text: Sequence[int], shift: int, tokens: Sequence[int]) -> int:
    """How many of the response's last `_RECENT` tokens differ in the text; `_RECENT` where none is the same."""
    n = len(tokens)
    first = max(0, n - _RECENT, -shift)
    same = sum(map(eq, tokens[first:], text[first + shift : n + shift]))
    return n - first - same if same else _RECENT


def _preceding(text: Sequence[int], position: int, tokens: Sequence[int], length: int) -> int:
    """How many of the response's last tokens precede `position`, at most `_LONGEST`; `length` are known to."""
    most = min(_LONGEST, position, len(tokens))
    while length < most and text[position - length - 1] == tokens[-length - 1]:
        length += 1
    return length


def propose(
    drafters: Sequence[SuffixDrafter],
    texts: Sequence[Sequence[int]],
    limits: Sequence[int],
    worth: Worth = unseen,
) -> list[array[int]]:
    """The proposals of several rows' drafters, searched together; a row with limit 0 is not searched."""
    matching = [drafter.observe(tokens) for drafter, tokens in zip(drafters, texts, strict=True)]
    searching = [i for i, (matches, limit) in enumerate(zip(matching, limits, strict=True)) if limit and not matches]
    if searching:
        found = find([drafters[i].texts for i in searching], [texts[i] for i in searching])
        for i, occurrences in zip(searching, found, strict=True):
            drafters[i].switch_source(texts[i], occurrences, worth)
    return [d.continuation(len(tokens), limit) for d, tokens, limit in zip(drafters, texts, limits, strict=True)]


def following(request: Request, ahead: Sequence[int]) -> Request:
    """The request with a drafter that follows what was rolled out ahead of it."""
    texts = request.drafter.texts if isinstance(request.drafter, SuffixDrafter) else PromptTexts()
    return replace(request, drafter=SuffixDrafter(texts, ahead=ahead))
