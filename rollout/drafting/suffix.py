"""Drafts from the texts of a prompt: the sample's old text at the same position, or a match of the last tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from operator import eq
from typing import Any, NamedTuple

from specrl.rollout.drafting.cost import prior
from specrl.rollout.drafting.ngrams import LENGTHS, NGrams, Occurrence, Piece, append, token_ids
from specrl.rollout.sections import SOURCES

_RECENT = 6  # last tokens of the response that are compared with the followed text
_LONGEST = 32  # matching tokens that are counted; more add no evidence
_LEVELS = [0, 1, 2, 3, 4, 4, 6, 6, *[8] * 8, *[16] * 16, _LONGEST]  # match level by number of matching tokens
_MATCHING = [(level, False) for level in _LEVELS]
_SEARCHED = "group", "earlier", "prompt"  # each source is a separate group of the index

MatchQuality = tuple[int, bool]
"""Evidence that a text will keep matching, as (match level, lost). The level is the number of the response's last
tokens that precede the position in the text, rounded down to one of `_LEVELS`; or negative, how many of the last
`_RECENT` tokens differ; or 0 without evidence. A row is lost if its last pass emitted a single, different token."""
Worth = Callable[[tuple[MatchQuality, str]], float]
"""Estimated acceptance of drafts by match quality and source."""


class Cursor(NamedTuple):
    """A text that a response follows: position n of the response is position n + shift of the text."""

    text: array[int]
    shift: int
    source: str

    def reaches(self, n: int) -> bool:
        """Whether the text goes on after the response's first `n` tokens."""
        return n + self.shift < len(self.text)


Match = tuple[int, int, Cursor]
"""A candidate to follow, with its match level and the start of its match in the response."""


def unseen(bucket: tuple[MatchQuality, str]) -> float:
    """The `Worth` before any draft has been observed."""
    (match, _), source = bucket
    return prior(match, source)


class PromptTexts:
    """The texts of one prompt: stored responses, the prompt, and responses that are being generated.

    Prompts that are searched together share an n-gram index, which searches build and update. It is not pickled.

    Args:
        stored: responses as token ids, newest first.
        sources: the subset of SOURCES to use.
        prompt: token ids.
    """

    def __init__(
        self, stored: Sequence[Sequence[int]] = (), sources: Collection[str] = SOURCES, prompt: Sequence[int] = ()
    ):
        self.sources = frozenset(sources)
        self.texts = [token_ids(text) for text in stored] if "earlier" in sources else []
        self.stored = len(self.texts)
        self._labels = ["earlier"] * self.stored  # source of each text
        self._prompts: set[tuple[int, ...]] = set()
        self.add_prompt(prompt)
        self.known = len(self.texts)
        self._reset_index()

    def _reset_index(self) -> None:
        self.index: NGrams | None = None
        self.groups: dict[str, int] = {}
        """Group number in the index of each source. Sources are searched separately."""
        self._indexed: list[int] = []  # tokens of each text that are in the index

    def source(self, text: int) -> str:
        """The source of a text."""
        return self._labels[text]

    def __getstate__(self) -> dict[str, Any]:
        names = "sources", "texts", "stored", "known", "_labels"
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prompts = set()
        self._reset_index()

    def add_prompt(self, prompt: Sequence[int]) -> None:
        """Adds the prompt of another row. Rows of a later turn share stored responses, but each has its own prompt."""
        ids = tuple(prompt)
        if ids and "prompt" in self.sources and ids not in self._prompts:
            self._prompts.add(ids)
            self._labels.append("prompt")
            self.texts.append(token_ids(ids))

    def open(self) -> array[int]:
        """Adds an empty text, to which the caller appends ids."""
        self._labels.append("group")
        self.texts.append(array("I"))
        return self.texts[-1]

    def join(self, index: NGrams) -> None:
        """Switches to this index."""
        self._reset_index()
        self.index = index
        sources = {*self._labels} | ({"group"} & self.sources)
        self.groups = {source: index.group() for source in _SEARCHED if source in sources}

    def unindexed(self) -> Iterator[Piece]:
        """The pieces missing from the index, most recent last. The caller must add them."""
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
    """The last occurrences of each text's longest suffix, one for each source of its prompt; see `NGrams.find`."""
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
    """Assigns each prompt one of the indices, or a new one with space for as many generated as stored tokens."""
    tokens = 2 * sum(len(text) for prompt in new for text in prompt.texts)
    most = len(_SEARCHED)  # groups of a prompt, which must be in one index
    index = next((index for index in indices if index.takes(most)), None)
    for prompt in new:
        if index is None or not index.takes(most):
            index = NGrams(tokens)
        prompt.join(index)


class SuffixDrafter:
    """Follows a text while it matches the response. After a mismatch, follows the text of highest expected acceptance.

    The sample's old text is followed first, at the same positions. After a mismatch the candidates are the followed
    text, as if one token had been replaced, and other occurrences of the response's last tokens: in an old text, in the
    prompt, or in the responses that the prompt's rows are generating. The candidate whose source and match quality had
    the highest acceptance is chosen. The method combines suffix matching (SuffixDecoding, arXiv 2411.04975),
    preference for longer matches (SAM decoding, arXiv 2411.10666), several sources (Hierarchy Drafting, arXiv
    2502.05609), and selection by past acceptance (TAGE branch prediction, Seznec and Michaud 2006).

    Args:
        texts: of the prompt, shared by the rows of one engine call. `propose` adds the row's new tokens to them.
        old: the sample's old text. Without one the newest stored text is followed first.
        keyed: a text that other weights sampled with the row's noise. It is followed instead of `old`.
        source: of `keyed`: `ahead` (a rollout ahead), `twin` (a run with the same seed), `evaluation` (the last one).
        twin: a second such text, of source `twin`, which is a candidate from the first mismatch on.
    """

    def __init__(
        self,
        texts: PromptTexts,
        old: Sequence[int] | None = None,
        keyed: Sequence[int] | None = None,
        source: str = "ahead",
        twin: Sequence[int] | None = None,
    ):
        self.texts = texts
        self.old = old
        self.keyed = keyed
        self.twin = twin
        self._first: Cursor | None = None
        if keyed is not None:
            self._first = Cursor(token_ids(keyed), 0, source)
        elif old is None and texts.stored:
            self._first = Cursor(texts.texts[0], 0, "earlier")
        elif old is not None and "prefix" in texts.sources:
            ids = token_ids(old)
            shared = next((text for text in texts.texts[: texts.stored] if text == ids), ids)
            self._first = Cursor(shared, 0, "prefix")
        self._begin()

    def _begin(self) -> None:
        """Resets the state for a new response."""
        self._followed = self._first
        self.quality: MatchQuality = 0, False
        """Match quality of the last draft."""
        self._matches_from = 0  # start of the response's match with the followed text
        self._left: Cursor | None = None  # what was followed before
        if self.twin is not None and self.twin is not self.keyed:
            self._left = Cursor(token_ids(self.twin), 0, "twin")
        self._length = 0  # of the response at the last `observe`
        self._grown = 0  # tokens that the last pass emitted, set at a mismatch
        self._text = self.texts.open() if "group" in self.texts.sources else None  # the response, as one of the texts

    @property
    def source(self) -> str:
        """Source of the last draft; empty if it follows no text."""
        return self._followed.source if self._followed else ""

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        return propose([self], [tokens], [limit])[0].tolist()

    def observe(self, tokens: Sequence[int]) -> bool:
        """Adds the response's new tokens to the texts. Returns whether the followed text matches and has more tokens.

        A response that is shorter than before is a new one, and starts a new text.
        """
        n = len(tokens)
        if n < self._length:  # the request is run again
            self._begin()
        if self._text is not None and n > (known := len(self._text)):
            append(self._text, list(tokens[known:]))
        followed = self._followed
        if not followed or not followed.reaches(n) or (n and followed.text[n + followed.shift - 1] != tokens[-1]):
            self._grown = n - self._length
            self._length = n
            return False
        matching = n - self._matches_from
        self._length = n
        self.quality = _MATCHING[matching if matching < _LONGEST else _LONGEST]
        return True

    def switch_source(self, tokens: Sequence[int], occurrences: Sequence[Occurrence], worth: Worth) -> None:
        """Chooses between the followed text, the one before it, and the occurrences of the response's last tokens."""
        followed = self._followed
        if followed and followed.source == "prefix":
            followed = followed._replace(source="position") if "position" in self.texts.sources else None
            self._followed = followed
        n = len(tokens)
        lost = self._grown <= 1
        best, chosen = -1.0, None
        for match in self._matches(tokens, occurrences):
            if (acceptance := worth(((match[0], lost), match[-1].source))) > best:
                best, chosen = acceptance, match
        if chosen is None:
            return
        level, self._matches_from, cursor = chosen
        self.quality = level, lost
        if not followed or cursor.text is not followed.text or cursor.shift != followed.shift:
            if followed and followed.reaches(n):
                self._left = followed
            self._followed = cursor

    def _matches(self, tokens: Sequence[int], occurrences: Sequence[Occurrence]) -> list[Match]:
        n, followed = len(tokens), self._followed
        matches = [
            (-_differing(cursor, tokens), n, cursor)
            for cursor in (followed, self._left)
            if cursor and cursor.reaches(n)
        ]
        for number, position, length in occurrences:
            text = self.texts.texts[number]
            if not followed or text is not followed.text or position - n != followed.shift:
                length = _preceding(text, position, tokens, length)
                matches.append((_LEVELS[length], n - length, Cursor(text, position - n, self.texts.source(number))))
        return matches

    def continuation(self, length: int, limit: int) -> array[int]:
        """At most `limit` tokens of the followed text, after the response's first `length` tokens."""
        if not self._followed:
            return array("I")
        start = length + self._followed.shift
        return self._followed.text[start : start + limit]


def _differing(cursor: Cursor, tokens: Sequence[int]) -> int:
    """How many of the response's last `_RECENT` tokens differ from the text; `_RECENT` if none is equal."""
    text, shift, _ = cursor
    n = len(tokens)
    first = max(0, n - _RECENT, -shift)
    same = sum(map(eq, tokens[first:], text[first + shift : n + shift]))
    return n - first - same if same else _RECENT


def _preceding(text: Sequence[int], position: int, tokens: Sequence[int], length: int) -> int:
    """How many of the response's last tokens precede `position`, at most `_LONGEST`. At least `length` do."""
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
    """The proposals of several rows' drafters, with one batched search. Rows with limit 0 are not searched."""
    matching = [drafter.observe(tokens) for drafter, tokens in zip(drafters, texts, strict=True)]
    searching = [i for i, (matches, limit) in enumerate(zip(matching, limits, strict=True)) if limit and not matches]
    if searching:
        found = find([drafters[i].texts for i in searching], [texts[i] for i in searching])
        for i, occurrences in zip(searching, found, strict=True):
            drafters[i].switch_source(texts[i], occurrences, worth)
    return [d.continuation(len(tokens), limit) for d, tokens, limit in zip(drafters, texts, limits, strict=True)]
