"""An index of where n-grams of many texts occurred last: flat arrays, filled and searched for many rows at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

LENGTHS = (8, 4, 2)
"""Tokens of the n-grams, longest first; each is twice the next."""
_LONGEST = LENGTHS[0]
_SPREAD = 4, 2  # table entries for each token: for expected tokens, and at least
_FEWEST = 1 << 16  # table entries, so that small indices have few collisions
_BLOCK = 1 << 15  # tokens or entries that are processed at a time, in fast memory
FULL = 1 << 22
"""Tokens of an index that takes no more groups."""
_ID_BITS = 20  # of a token, in 32 bits; the others hold the number of its group
GROUPS = 1 << 32 - _ID_BITS
"""Groups that an index can number."""
_NO_ID = (1 << _ID_BITS) - 1  # for all ids that need more bits
_PRIMES = {1: np.uint32(0x9E3779B1), 2: np.uint32(0x85EBCA77), 4: np.uint32(0xC2B2AE3D)}
"""Of xxHash, by the length of the n-grams that are joined; similar factors would give many n-grams one hash."""
_MIX = np.uint32(0x27D4EB2F)

Piece = tuple[int, int, "array[int]", int]
"""(group, text, the text's tokens so far, how many of them were added before)"""
Occurrence = tuple[int, int, int]
"""(text, position, length of the n-gram before it); the length is one of `LENGTHS`, 0 if nothing was found."""
NOT_FOUND: Occurrence = (0, 0, 0)


def token_ids(tokens: Sequence[int]) -> array[int]:
    """The ids in four bytes each; values that cannot be ids become one that no vocabulary has."""
    if isinstance(tokens, array):
        return tokens
    ids = array("I")
    append(ids, list(tokens))
    return ids


def append(ids: array[int], tokens: list[int]) -> None:
    """Adds the tokens, best a list, as `token_ids` gives them."""
    try:
        ids.fromlist(tokens)
    except (OverflowError, TypeError):
        ids.fromlist([t if isinstance(t, int) and 0 <= t < 1 << 32 else (1 << 32) - 1 for t in tokens])


class NGrams:
    """The n-grams of groups of texts, and where each occurred last. Groups are searched separately.

    Text is appended to one buffer in pieces, each after the few tokens before it, so that every n-gram lies in one
    piece. A table for each length maps the hash of an n-gram to the position after it; of equal hashes the last one is
    kept. A search compares the tokens, so a collision loses a guess and never gives a wrong one.
    """

    def __init__(self, tokens: int = 0):
        """Args: tokens: about how many will be held; the index grows for more."""
        self._tokens = np.zeros(max(tokens, 1 << 10), np.uint32)  # with their group's number in the upper bits
        self._held = _LONGEST  # of these; entry 0 of a table means that nothing was seen
        self._groups = 0
        self._added = 0  # tokens, without those that are repeated before a piece
        self._ends = np.zeros((len(LENGTHS), max(_SPREAD[0] * tokens, _FEWEST)), np.int32)
        self._pieces = np.empty((3, 64), np.int32)  # where each begins in the buffer and in its text, and which text
        self._count = 0  # of these

    def takes(self, groups: int) -> bool:
        """Whether so many more groups may begin here; else the caller begins another index."""
        return self._added <= FULL and self._groups + groups <= GROUPS

    def group(self) -> int:
        """Begins a group of texts, which the index must take; returns its number."""
        self._groups += 1
        return self._groups - 1

    def add(self, pieces: Sequence[Piece]) -> None:
        """Appends to texts; later pieces are more recent."""
        upto = np.cumsum([len(text) - known for _, _, text, known in pieces])
        self._reserve(int(upto[-1]))
        cuts = np.flatnonzero(np.diff(upto // _BLOCK)) + 1
        for first, last in pairwise([0, *cuts.tolist(), len(pieces)]):
            self._add(pieces[first:last])

    def find(
        self, groups: Sequence[int], suffixes: Sequence[Sequence[int]], suffix_of: Sequence[int] | None = None
    ) -> list[Occurrence]:
        """The most recent occurrence in each group of the longest part of a suffix that occurs there.

        Args:
            suffixes: the last tokens of each text, at most 8.
            suffix_of: index of the suffix to search for in each group; by default the i-th in the i-th.
        """
        if not self._count:
            return [NOT_FOUND] * len(groups)
        known = np.fromiter(map(len, suffixes), np.int32, len(suffixes))
        if known.min() < _LONGEST:
            suffixes = [[0] * (_LONGEST - len(suffix)) + [*suffix] for suffix in suffixes]
        ids = _ids([token_ids([*chain.from_iterable(suffixes)])])
        ids = ids.reshape(-1, _LONGEST)
        if suffix_of is not None:
            ids, known = ids[suffix_of], known[suffix_of]
        ids = ids | _marks(groups)[:, None]
        best, matched = np.zeros((2, len(ids)), np.int32)
        for length, ends, hashes in zip(reversed(LENGTHS), self._ends[::-1], _hashes(ids), strict=True):
            at = ends[_entries(hashes[:, -1], ends.size)]
            seen = self._tokens[at[:, None] + np.arange(-length, 0)]
            hit = (seen == ids[:, -length:]).all(axis=1) & (at > 0) & (known >= length)
            best[hit], matched[hit] = at[hit], length
        begins, starts, texts = self._pieces[:, : self._count]
        piece = np.searchsorted(begins, best, side="right") - 1
        columns = texts[piece], best - begins[piece] + starts[piece], matched
        occurrences = zip(*(column.tolist() for column in columns), strict=True)
        return [occurrence if occurrence[2] else NOT_FOUND for occurrence in occurrences]

    def _add(self, pieces: Sequence[Piece]) -> None:
        groups, texts, full_texts, lengths_known = zip(*pieces, strict=True)
        known = np.array(lengths_known, np.int32)
        starts = np.maximum(known - _LONGEST, 0)
        tails = [text[start:] for text, start in zip(full_texts, starts.tolist(), strict=True)]
        lengths = np.fromiter(map(len, tails), np.int32, len(tails))
        begins = np.zeros_like(lengths)
        np.cumsum(lengths[:-1], out=begins[1:])
        ids = _ids(tails)
        ids |= np.repeat(_marks(groups), lengths)
        first = self._held
        self._held += len(ids)
        self._count += len(tails)
        self._tokens = _grown(self._tokens, self._held)
        self._pieces = _grown(self._pieces, self._count)
        self._tokens[first : self._held] = ids
        self._pieces[:, self._count - len(tails) : self._count] = begins + first, starts, texts
        within = np.arange(len(ids), dtype=np.int32) - np.repeat(begins, lengths)
        new = known - starts
        added = np.flatnonzero(within >= np.repeat(new, lengths))
        for length, ends, hashes in zip(reversed(LENGTHS), self._ends[::-1], _hashes(ids), strict=False):
            at = added if new.min() >= length else added[within[added] >= length]  # what follows an n-gram
            ends[_entries(hashes[at - length], ends.size)] = at + first

    def _reserve(self, tokens: int) -> None:
        """Grows the tables for that many more. They double, so that entries never collide that did not before."""
        self._added += tokens
        size = larger = self._ends.shape[1]
        while larger < _SPREAD[1] * self._added:
            larger *= 2
        if larger == size:
            return
        small = self._ends
        self._ends = np.zeros((len(LENGTHS), larger), np.int32)
        tables = zip(reversed(LENGTHS), small[::-1], self._ends[::-1], strict=True)
        for (length, old, new), hashes in zip(tables, _hashes(self._tokens[: self._held]), strict=False):
            for first in range(0, size, _BLOCK):
                at = old[first : first + _BLOCK]
                at = at[at > 0]
                new[_entries(hashes[at - length], larger)] = at


def _marks(groups: Sequence[int]) -> NDArray[np.uint32]:
    """The groups' numbers in the bits above those of tokens."""
    return np.array(groups, np.uint32) << np.uint32(_ID_BITS)


def _hashes(ids: NDArray[np.uint32]) -> Iterator[NDArray[np.uint32]]:
    """Of the n-grams that begin at each index of the last axis, shortest first, as far as one fits."""
    ids = _mixed(ids)  # groups differ in few bits
    length = 1
    while length < min(ids.shape[-1], _LONGEST):
        ids = ids[..., :-length] * _PRIMES[length] + ids[..., length:]
        length *= 2
        yield ids


def _mixed(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Every upper bit depends on all bits."""
    return (bits ^ bits >> np.uint32(15)) * _MIX


def _entries(hashes: NDArray[np.uint32], size: int) -> NDArray[np.int64]:
    return (_mixed(hashes).astype(np.uint64) * np.uint64(size) >> np.uint64(32)).view(np.int64)


def _ids(texts: Sequence[array[int]]) -> NDArray[np.uint32]:
    """The tokens of all texts, one after the other, each in `_ID_BITS` bits."""
    joined = array("I")
    for text in texts:
        joined += text
    ids = np.frombuffer(joined, np.uint32)
    return np.minimum(ids, _NO_ID, out=ids)


def _grown(held: NDArray, size: int) -> NDArray:
    """The array with at least `size` entries in its last axis, which doubles."""
    if size <= held.shape[-1]:
        return held
    grown = np.empty((*held.shape[:-1], max(size, 2 * held.shape[-1])), held.dtype)
    grown[..., : held.shape[-1]] = held
    return grown
