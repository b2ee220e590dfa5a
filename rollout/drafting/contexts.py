"""Drafts from the texts of all prompts: what followed the last few tokens, and how often such guesses came true."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from specrl.rollout.drafting.cost import MOST, emitted

_LENGTHS = (6, 4, 3)  # tokens of a context, longest first
_MOST = 15  # hits and misses of an entry go no further, as habits change
_RATES, _SIZES = 5, 4  # levels of each length: quarters of hits, and how many observations they rest on
_PER_PROMPT = 2  # responses to one prompt that are learnt: its others say much the same
_MEMORY = 4000  # guesses over which a level's record is averaged


class ContextTable:
    """Predicts the next token from the last ones, in the manner of TAGE branch prediction (Seznec and Michaud 2006).

    For each of a few lengths a table maps the last tokens to the one that followed, with its hits and misses; another
    token takes the place when misses outnumber hits. The longest context seen more than once decides. Its length and
    record make the *level* of the guess. Before a text is learnt it is guessed: how often guesses of a level came true
    is the probability that such a draft token will be accepted, and only what is likely enough to pay is drafted.

    Token Recycling (arXiv 2408.08696) and n-gram look-up keep successors without a record, so that they cannot tell the
    template of a text from its numbers.

    Args: capacity: contexts of one generation, about 250 bytes each. A full generation becomes the old one, and what
    the old one held is forgotten unless it was seen again meanwhile.
    """

    def __init__(self, capacity: int = 1 << 17):
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self._new: list[dict[tuple[int, ...], int]] = [{} for _ in _LENGTHS]  # token << 8 | hits << 4 | misses
        self._old: list[dict[tuple[int, ...], int]] = [{} for _ in _LENGTHS]
        self._right = [0.5] * (len(_LENGTHS) * _RATES * _SIZES)  # guesses of each level that came true, and all
        self._guesses = [2.0] * len(self._right)
        self._surest = 0.25

    def __len__(self) -> int:
        """Contexts held."""
        return sum(map(len, (*self._new, *self._old)))

    def learn(self, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Adds responses of one rollout, given as (prompt, response) token ids: the first few of each prompt."""
        heard: Counter[tuple[int, ...]] = Counter()
        chosen = []
        for prompt, tokens in texts:
            heard[key := tuple(prompt)] += 1
            if heard[key] <= _PER_PROMPT:
                chosen.append(((*prompt[-_LENGTHS[0] :], *tokens), len(tokens)))
        for text, length in chosen:  # all are guessed before any is added: the rows of a rollout know not each other
            self._check(text, length)
        self._surest = max(right / guesses for right, guesses in zip(self._right, self._guesses, strict=True))
        for text, length in chosen:
            self._add(text, length)
        if sum(map(len, self._new)) > self.capacity:
            self._old, self._new = self._new, [{} for _ in _LENGTHS]

    def next(self, context: tuple[int, ...]) -> tuple[int, float] | None:
        """The token that most likely follows, and the probability that it does; None for unknown contexts.

        Args: context: the tokens before it, prompt included; the last 6 are enough.
        """
        guess = self._look_up(context)
        return guess and (guess[0], self._right[guess[1]] / self._guesses[guess[1]])

    def draft(self, context: Sequence[int], limit: int, price: float, beat: float = 0.0) -> tuple[list[int], float]:
        """Likely next tokens, as long as the chance that all of them stand is at least `price`.

        Args: context: prompt and response so far; limit: most tokens; beat: a gain that must be exceeded, else nothing
        is drafted: the search ends where it can no longer be.
        Returns: the tokens, and the expected number of accepted ones less the price of all.
        """
        tokens: list[int] = []
        stands, gain, context = 1.0, 0.0, tuple(context[-_LENGTHS[0] :])
        while len(tokens) < limit and gain + self.most(limit - len(tokens), price, stands) > beat:
            if not (guess := self.next(context)) or (stands := stands * guess[1]) < price:
                break
            tokens.append(guess[0])
            gain += stands - price
            context = (*context[1 - _LENGTHS[0] :], guess[0])
        return (tokens, gain) if gain > beat else ([], 0.0)

    def most(self, limit: int, price: float, stands: float = 1.0) -> float:
        """What a draft of at most `limit` tokens can gain behind tokens that stand with probability `stands`."""
        sure = min(self._surest, MOST)
        if stands * sure < price:
            return 0.0
        k = min(limit, int(math.log(price / stands) / math.log(sure))) if price > 0 else limit
        return stands * (emitted(sure, k) - 1) - price * k + 1e-9  # rounding must not decide

    def _look_up(self, context: tuple[int, ...]) -> tuple[int, int] | None:
        """The guess and its level."""
        unsure = None
        for i, length in enumerate(_LENGTHS):
            suffix = context[-length:]
            entry = self._new[i].get(suffix)
            if entry is None:
                entry = self._old[i].get(suffix)
            if entry is not None:
                hits, seen = entry >> 4 & _MOST, (entry >> 4 & _MOST) + (entry & _MOST)
                size = 0 if seen < 2 else 1 if seen < 4 else 2 if seen < 9 else 3
                guess = entry >> 8, (i * _RATES + hits * (_RATES - 1) // seen) * _SIZES + size
                if hits > 1:
                    return guess
                unsure = unsure or guess
        return unsure

    def _check(self, text: tuple[int, ...], length: int) -> None:
        """Guesses each of the last `length` tokens, and notes what came true."""
        for at in range(len(text) - length, len(text)):
            if guess := self._look_up(text[max(0, at - _LENGTHS[0]) : at]):
                token, level = guess
                if self._guesses[level] >= _MEMORY:
                    self._right[level], self._guesses[level] = self._right[level] / 2, self._guesses[level] / 2
                self._right[level] += token == text[at]
                self._guesses[level] += 1

    def _add(self, text: tuple[int, ...], length: int) -> None:
        for size, new, old in zip(_LENGTHS, self._new, self._old, strict=True):
            for at in range(max(len(text) - length, size), len(text)):
                context, token = text[at - size : at], text[at]
                entry = new.get(context)
                if entry is None:
                    entry = old.pop(context, None)
                new[context] = token << 8 | 1 << 4 if entry is None else _updated(entry, token)


def _updated(entry: int, token: int) -> int:
    """The entry after `token` followed its context. A full count halves the other, so that the present weighs more."""
    known, hits, misses = entry >> 8, entry >> 4 & _MOST, entry & _MOST
    if known == token:
        hits, misses = (hits + 1, misses) if hits < _MOST else (hits, misses // 2)
    else:
        hits, misses = (hits, misses + 1) if misses < _MOST else (hits // 2, misses)
        if misses > hits:
            known, hits = token, 1
    return known << 8 | hits << 4 | misses
