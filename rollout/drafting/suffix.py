"""Drafts from the texts of a prompt: the sample's old one at its positions, or what continues the response's end."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import eq
from typing import Any

from specrl.rollout.drafting.cost import prior
from specrl.rollout.drafting.ngrams import LENGTHS, NGrams, Piece, Place, append, token_ids
from specrl.rollout.sections import SOURCES
from specrl.rollout.types import Request

_RECENT = 6  # positions over which a text that is being followed shows whether it still fits
_LONGEST = 32  # tokens that fit; more say no more
_LEVELS = [0, 1, 2, 3, 4, 4, 6, 6, *[8] * 8, *[16] * 16, _LONGEST]  # of what fits, by tokens
_FITTING = [(level, False) for level in _LEVELS]
_SEARCHED = "group", "earlier", "prompt"  # each is a group of its own in an index

MatchQuality = tuple[int, bool]
"""What speaks for a place that is followed. First the response's last tokens that stand before it, at one of `_LEVELS`;
or as many, below 0, as are others of the last `_RECENT`; 0 where there are none. Then whether the row is lost: its last
pass brought one token, and it is not the text's."""
Worth = Callable[[tuple[MatchQuality, str]], float]
"""How often tokens stand of drafts that fit so well and come from there."""
Option = tuple[int, int, "array[int]", int, str]
"""A text that may be followed: (fit, where in the response it begins to, text, distance of their positions, source)"""


def unseen(kind: tuple[MatchQuality, str]) -> float:
    """The `Worth` of drafts of which nothing is known yet."""
    (fit, _), source = kind
    return prior(fit, source)


class PromptTexts:
    """The texts of one prompt: stored ones, the prompt, and those in the making; and where each suffix was seen last.

    Prompts that are searched together share an index, which is built and brought up to date by the searches. So it does
    not travel to a worker.

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
        self._forget()

    def _forget(self) -> None:
        self.index: NGrams | None = None
        self.groups: dict[str, int] = {}
        """The prompt's numbers in the index: each source of texts is searched by itself."""
        self._indexed: list[int] = []  # tokens of each text that the index holds

    def source(self, text: int) -> str:
        """Where a text comes from."""
        return "earlier" if text < self.stored else "prompt" if text < self.known else "group"

    def __getstate__(self) -> dict[str, Any]:
        return {"sources": self.sources, "texts": self.texts, "stored": self.stored, "known": self.known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def open(self) -> array[int]:
        """Begins a new text, which grows as its ids are appended."""
        self.texts.append(array("I"))
        return self.texts[-1]

    def join(self, index: NGrams) -> None:
        """Searches go to that index from now on."""
        self._forget()
        self.index = index
        sources = {self.source(text) for text in range(self.known)} | ({"group"} & self.sources)
        self.groups = {source: index.group() for source in _SEARCHED if source in sources}

    def unindexed(self) -> Iterator[Piece]:
        """What the index lacks, the most recent last; it is taken to be added now."""
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


def find(prompts: Sequence[PromptTexts], texts: Sequence[Sequence[int]]) -> list[list[Place]]:
    """What followed the longest suffix of each text, for each source of its prompt that has one: see `NGrams.find`."""
    asked = dict.fromkeys(prompts)
    _join([prompt for prompt in asked if prompt.index is None], [prompt.index for prompt in asked if prompt.index])
    found: list[list[Place]] = [[] for _ in prompts]
    for index in dict.fromkeys(prompt.index for prompt in asked):
        if lacking := [piece for prompt in asked if prompt.index is index for piece in prompt.unindexed()]:
            index.add(lacking)
        rows = [i for i, prompt in enumerate(prompts) if prompt.index is index]
        groups = [prompts[i].groups.values() for i in rows]
        of = [k for k, several in enumerate(groups) for _ in several]
        places = index.find([*chain.from_iterable(groups)], [texts[i][-LENGTHS[0] :] for i in rows], of)
        for k, place in zip(of, places, strict=True):
            if place[2]:
                found[rows[k]].append(place)
    return found


def _join(new: Sequence[PromptTexts], indices: Sequence[NGrams]) -> None:
    """Gives the prompts one of the indices, or one of their own; their rows may write as much as was stored."""
    tokens = 2 * sum(len(text) for prompt in new for text in prompt.texts)
    most = len(_SEARCHED)  # of a prompt, all in one index
    index = next((index for index in indices if index.takes(most)), None)
    for prompt in new:
        if index is None or not index.takes(most):
            index = NGrams(tokens)
        prompt.join(index)


class SuffixDrafter:
    """Follows a text while it fits, and leaves it for one that promises more.

    The sample's old text is followed first, at the same positions. After a mismatch it is followed further, as if one
    token had been replaced, or another place where the last tokens of the response stand: in an old text, in the
    prompt, in what the prompt's rows have emitted. Which of these is decided by what became of such drafts: of that
    source, that fitted as well. Suffix matching is SuffixDecoding's (arXiv 2411.04975), longer matches before shorter
    ones SAM decoding's (arXiv 2411.10666), several sources Hierarchy Drafting's (arXiv 2502.05609), and the choice by
    records that of TAGE branch prediction, as in `ContextTable`.

    Args:
        texts: of the prompt, shared by the rows of one engine call; what a row emits is added when it asks.
        own: the sample's old text; without one the newest stored text is followed first.
        ahead: what was rolled out ahead of the row, under its own noise; followed in the place of `own`.
    """

    def __init__(self, texts: PromptTexts, own: Sequence[int] | None = None, ahead: Sequence[int] | None = None):
        self.texts = texts
        self._first: tuple[array[int] | None, str] = None, "prefix" if ahead is None else "ahead"
        if ahead is not None:
            self._first = token_ids(ahead), "ahead"
        elif own is None and texts.stored:
            self._first = texts.texts[0], "earlier"
        elif own is not None and "prefix" in texts.sources:
            own = token_ids(own)
            self._first = (
                next((text for text in texts.texts[: texts.stored] if text == own), own),
                "prefix",
            )  # goes once
        self._begin()

    def _begin(self) -> None:
        """A response begins."""
        self._followed, self.source = self._first
        """The text that is followed, and where the last draft came from."""
        self._shift = 0
        self.fit: MatchQuality = 0, False
        """What speaks for that draft."""
        self._fits_from = 0  # of the response: from there on it has been the text that is followed
        self._left: tuple[array[int], int, str] | None = None  # the one followed before, with its shift and source
        self._length = self._grown = 0  # of the response, and by how much it had grown, when it was last shown
        self._told = self.texts.open() if "group" in self.texts.sources else None

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        return propose([self], [tokens], [limit])[0].tolist()

    def tell(self, tokens: Sequence[int]) -> bool:
        """Adds what the response has grown by to the texts; whether the text that is followed fits, and goes on.

        A response that is shorter than before is another one: what it is told of is a text of its own.
        """
        n = len(tokens)
        if n < self._length:  # its request is run again
            self._begin()
        if self._told is not None and n > (told := len(self._told)):
            append(self._told, tokens[told:])
        at, text = n + self._shift, self._followed
        if text is None or at >= len(text) or (n and text[at - 1] != tokens[-1]):
            self._grown, self._length = n - self._length, n
            return False
        fits, self._length = n - self._fits_from, n
        self.fit = _FITTING[fits if fits < _LONGEST else _LONGEST]
        return True

    def turn(self, tokens: Sequence[int], places: Sequence[Place], worth: Worth) -> None:
        """Follows what is worth most: the text so far, the one before, or one of the places.

        Args: places: (text, position, tokens that precede it, at least) where the response's last tokens stand.
        """
        if self.source == "prefix":
            self.source = "position"
            if "position" not in self.texts.sources:
                self._followed = None
        n, lost, best, chosen = len(tokens), self._grown <= 1, -1.0, None
        for option in self._options(tokens, places):
            if (promised := worth(((option[0], lost), option[-1]))) > best:
                best, chosen = promised, option
        if chosen is None:
            return
        fit, self._fits_from, text, shift, source = chosen
        self.fit = fit, lost
        if text is not self._followed or shift != self._shift:
            if self._followed is not None and n + self._shift < len(self._followed):
                self._left = self._followed, self._shift, self.source
            self._followed, self._shift, self.source = text, shift, source

    def _options(self, tokens: Sequence[int], places: Sequence[Place]) -> list[Option]:
        n, followed, known = len(tokens), self._followed, self.texts
        options = []
        if followed is not None and n + self._shift < len(followed):
            options.append((-_others(followed, self._shift, tokens), n, followed, self._shift, self.source))
        if self._left and n + self._left[1] < len(self._left[0]):
            text, shift, source = self._left
            options.append((-_others(text, shift, tokens), n, text, shift, source))
        for number, at, length in places:
            text = known.texts[number]
            if text is not followed or at - n != self._shift:
                length = _preceding(text, at, tokens, length)
                options.append((_LEVELS[length], n - length, text, at - n, known.source(number)))
        return options

    def ahead(self, length: int, limit: int) -> array[int]:
        """At most `limit` tokens that follow the first `length` in the text that is followed."""
        start = length + self._shift
        return array("I") if self._followed is None else self._followed[start : start + limit]


def _others(text: Sequence[int], shift: int, tokens: Sequence[int]) -> int:
    """Of the response's last `_RECENT` tokens, how many are others in the text; all, where none is the same."""
    n = len(tokens)
    first = max(0, n - _RECENT, -shift)
    same = sum(map(eq, tokens[first:], text[first + shift : n + shift]))
    return n - first - same if same else _RECENT


def _preceding(text: Sequence[int], at: int, tokens: Sequence[int], length: int) -> int:
    """The last tokens of the response that stand before position `at`, at most `_LONGEST`; `length` are known to."""
    most = min(_LONGEST, at, len(tokens))
    while length < most and text[at - length - 1] == tokens[-length - 1]:
        length += 1
    return length


def propose(
    drafters: Sequence[SuffixDrafter],
    texts: Sequence[Sequence[int]],
    limits: Sequence[int],
    worth: Worth = unseen,
) -> list[array[int]]:
    """What `SuffixDrafter.propose` gives for each row, all asked together; without a limit nothing is searched."""
    fits = [drafter.tell(tokens) for drafter, tokens in zip(drafters, texts, strict=True)]
    astray = [i for i, (fit, limit) in enumerate(zip(fits, limits, strict=True)) if limit and not fit]
    if astray:
        found = find([drafters[i].texts for i in astray], [texts[i] for i in astray])
        for i, places in zip(astray, found, strict=True):
            drafters[i].turn(texts[i], places, worth)
    return [drafter.ahead(len(tokens), limit) for drafter, tokens, limit in zip(drafters, texts, limits, strict=True)]


def following(request: Request, ahead: Sequence[int]) -> Request:
    """The request, its row following what was rolled out ahead of it."""
    texts = request.drafter.texts if isinstance(request.drafter, SuffixDrafter) else PromptTexts()
    return replace(request, drafter=SuffixDrafter(texts, ahead=ahead))
