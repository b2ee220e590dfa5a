"""An index of the last occurrences of n-grams in many texts, in flat arrays that are searched in batches."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

LENGTHS = (8, 4, 2)
"""Lengths of the n-grams, longest first. Each is twice the next."""
_LONGEST = LENGTHS[0]
_SPREAD = 4, 2  # table entries per token: for the expected tokens, and as a minimum
_FEWEST = 1 << 16  # minimum table entries, so that small indices have few collisions
_BLOCK = 1 << 15  # tokens or entries processed at a time, to fit the CPU cache
FULL = 1 << 22
"""Tokens beyond which an index accepts no more groups."""
_ID_BITS = 20  # of 32 for the token id; the others hold the group number
GROUPS = 1 << 32 - _ID_BITS
"""Maximum number of groups of an index."""
_NO_ID = (1 << _ID_BITS) - 1  # replaces all ids that need more bits
_PRIMES = {1: np.uint32(0x9E3779B1), 2: np.uint32(0x85EBCA77), 4: np.uint32(0xC2B2AE3D)}
"""Factors from xxHash, by the length of the n-grams to join. Similar factors would cause many collisions."""
_MIX = np.uint32(0x27D4EB2F)

Piece = tuple[int, int, "array[int]", int]
"""(group, text number, the text's tokens so far, how many of them the index already contains)"""
Occurrence = tuple[int, int, int]
"""(text number, position, length of the n-gram that ends there). The length is one of `LENGTHS`, or 0 for no match."""
NOT_FOUND: Occurrence = (0, 0, 0)


def token_ids(tokens: Sequence[int]) -> array[int]:
    """The ids as uint32. Values outside that range become 2^32 - 1, which no vocabulary has."""
    if isinstance(tokens, array):
        return tokens
    ids = array("I")
    append(ids, list(tokens))
    return ids


def append(ids: array[int], tokens: list[int]) -> None:
    """Appends the tokens, converted as by `token_ids`."""
    try:
        ids.fromlist(tokens)
    except (OverflowError, TypeError):
        ids.fromlist([t if isinstance(t, int) and 0 <= t < 1 << 32 else (1 << 32) - 1 for t in tokens])


class NGrams:
    """Maps each n-gram of several groups of texts to its last occurrence. Groups are searched separately.

    Texts are appended to one buffer in pieces. Each piece repeats the few tokens before it, so that every n-gram is
    contained in one piece. A hash table for each length maps an n-gram to the position after it, and a later n-gram
    overwrites an earlier one with the same hash. A search compares the tokens, so a collision can hide a match but
    never yields a wrong one.
    """

    def __init__(self, tokens: int = 0):
        """Args: tokens: expected number of tokens. The index grows if there are more."""
        self._tokens = np.zeros(max(tokens, 1 << 10), np.uint32)  # with the group number in the upper bits
        self._held = _LONGEST  # tokens in use; 0 in a table means no occurrence
        self._groups = 0
        self._added = 0  # tokens, without the repeated ones
        self._ends = np.zeros((len(LENGTHS), max(_SPREAD[0] * tokens, _FEWEST)), np.int32)
        self._pieces = np.empty((3, 64), np.int32)  # start in the buffer, start in the text, text number
        self._count = 0  # pieces in use

    def takes(self, groups: int) -> bool:
        """Whether the index accepts `groups` more groups. If not, the caller creates another index."""
        return self._added <= FULL and self._groups + groups <= GROUPS

    def group(self) -> int:
        """Starts a group of texts and returns its number. `takes` must be true."""
        self._groups += 1
        return self._groups - 1

    def add(self, pieces: Sequence[Piece]) -> None:
        """Adds pieces of texts, the most recent last."""
        upto = np.cumsum([len(text) - known for _, _, text, known in pieces])
        self._reserve(int(upto[-1]))
        cuts = np.flatnonzero(np.diff(upto // _BLOCK)) + 1
        for first, last in pairwise([0, *cuts.tolist(), len(pieces)]):
            self._add(pieces[first:last])

    def find(
        self, groups: Sequence[int], suffixes: Sequence[Sequence[int]], suffix_of: Sequence[int] | None = None
    ) -> list[Occurrence]:
        """The last occurrence in each group of the longest n-gram at the end of a suffix.

        Args:
            suffixes: the last tokens of each text, at most 8.
            suffix_of: index of the suffix to search for in each group; by default the i-th suffix for the i-th group.
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
            at = added if new.min() >= length else added[within[added] >= length]  # after a complete n-gram
            ends[_entries(hashes[at - length], ends.size)] = at + first

    def _reserve(self, tokens: int) -> None:
        """Grows the tables for `tokens` more tokens. Sizes double, so that existing entries get no new collisions."""
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
    """The group numbers, shifted above the bits of token ids."""
    return np.array(groups, np.uint32) << np.uint32(_ID_BITS)


def _hashes(ids: NDArray[np.uint32]) -> Iterator[NDArray[np.uint32]]:
    """The hashes of the n-grams that start at each index of the last axis, for one length after another from 2."""
    ids = _mixed(ids)  # group numbers differ in few bits
    length = 1
    while length < min(ids.shape[-1], _LONGEST):
        ids = ids[..., :-length] * _PRIMES[length] + ids[..., length:]
        length *= 2
        yield ids


def _mixed(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A mix in which every upper bit depends on all input bits."""
    return (bits ^ bits >> np.uint32(15)) * _MIX


def _entries(hashes: NDArray[np.uint32], size: int) -> NDArray[np.int64]:
    return (_mixed(hashes).astype(np.uint64) * np.uint64(size) >> np.uint64(32)).view(np.int64)


def _ids(texts: Sequence[array[int]]) -> NDArray[np.uint32]:
    """The concatenated tokens of all texts, limited to `_ID_BITS` bits."""
    joined = array("I")
    for text in texts:
        joined += text
    ids = np.frombuffer(joined, np.uint32)
    return np.minimum(ids, _NO_ID, out=ids)


def _grown(held: NDArray, size: int) -> NDArray:
    """The array, or a copy whose last axis is doubled or, if that is too short, has `size` entries."""
    if size <= held.shape[-1]:
        return held
    grown = np.empty((*held.shape[:-1], max(size, 2 * held.shape[-1])), held.dtype)
    grown[..., : held.shape[-1]] = held
    return grown
