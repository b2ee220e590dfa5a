"""Drafts from the texts of all prompts: what followed the last few tokens, and how often such guesses were right."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from specrl.rollout.drafting.cost import MOST, emitted

_LENGTHS = (6, 4, 3)  # tokens of a context, longest first
_MOST = 15  # cap of an entry's hits and misses, so that it adapts
_RATES, _SIZES = 5, 4  # levels of each length: quarters of hits, and by the number of observations
_PER_PROMPT = 2  # responses to one prompt that are learnt: its others are similar
_MEMORY = 4000  # guesses over which a level's hit rate is averaged


class ContextTable:
    """Predicts the next token from the last ones, in the manner of TAGE branch prediction (Seznec and Michaud 2006).

    For each of a few lengths a table maps the last tokens to the one that followed, with its hits and misses; another
    token replaces it when misses outnumber hits. The longest context seen more than once decides. Its length and hit
    rate make the *level* of the guess. A text is predicted before it is learnt: the hit rate of a level is the
    probability that such a draft token will be accepted, and only what is likely enough to pay is drafted.

    Token Recycling (arXiv 2408.08696) and n-gram look-up keep successors without a hit rate, so they cannot distinguish
    the template of a text from its numbers.

    Args: capacity: contexts of one generation, about 250 bytes each. A full generation becomes the old one; contexts
    of the old one are dropped with the next unless they were seen again.
    """

    def __init__(self, capacity: int = 1 << 17):
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Removes all contexts."""
        self._new: list[dict[tuple[int, ...], int]] = [{} for _ in _LENGTHS]  # token << 8 | hits << 4 | misses
        self._old: list[dict[tuple[int, ...], int]] = [{} for _ in _LENGTHS]
        self._right = [0.5] * (len(_LENGTHS) * _RATES * _SIZES)  # right guesses of each level, and all
        self._guesses = [2.0] * len(self._right)
        self._surest = 0.25

    def __len__(self) -> int:
        """Contexts held."""
        return sum(map(len, (*self._new, *self._old)))

    def learn(self, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Adds responses of one rollout, given as (prompt, response) token ids: the first few of each prompt."""
        responses: Counter[tuple[int, ...]] = Counter()
        chosen = []
        for prompt, tokens in texts:
            key = tuple(prompt)
            responses[key] += 1
            if responses[key] <= _PER_PROMPT:
                chosen.append(((*prompt[-_LENGTHS[0] :], *tokens), len(tokens)))
        for text, length in chosen:  # before any is added: the rows of a rollout cannot draft from each other
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
        """Likely next tokens, while the probability that all of them are accepted is at least `price`.

        Args: context: prompt and response so far; limit: most tokens; beat: the gain to exceed, else nothing is drafted
        (the search ends when it can no longer be exceeded).
        Returns: the tokens, and the expected number of accepted tokens less the price of all.
        """
        tokens: list[int] = []
        context = tuple(context[-_LENGTHS[0] :])
        accepted = 1.0  # probability that all tokens are
        gain = 0.0
        while len(tokens) < limit and gain + self.highest_gain(limit - len(tokens), price, accepted) > beat:
            guess = self.next(context)
            if guess is None or accepted * guess[1] < price:
                break
            accepted *= guess[1]
            tokens.append(guess[0])
            gain += accepted - price
            context = (*context[1 - _LENGTHS[0] :], guess[0])
        return (tokens, gain) if gain > beat else ([], 0.0)

    def highest_gain(self, limit: int, price: float, accepted: float = 1.0) -> float:
        """An upper bound on the gain of at most `limit` tokens after tokens that are accepted with that probability."""
        sure = min(self._surest, MOST)
        if accepted * sure < price:
            return 0.0
        k = min(limit, int(math.log(price / accepted) / math.log(sure))) if price > 0 else limit
        return accepted * (emitted(sure, k) - 1) - price * k + 1e-9  # rounding must not decide

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
        """Predicts each of the last `length` tokens, and counts the right guesses of each level."""
        for at in range(len(text) - length, len(text)):
            if guess := self._look_up(text[max(0, at - _LENGTHS[0]) : at]):
                token, level = guess
                if self._guesses[level] >= _MEMORY:
                    self._right[level] /= 2
                    self._guesses[level] /= 2
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
    """The entry after `token` followed its context. A full count halves the other, so that recent texts weigh more."""
    known, hits, misses = entry >> 8, entry >> 4 & _MOST, entry & _MOST
    if known == token:
        hits, misses = (hits + 1, misses) if hits < _MOST else (hits, misses // 2)
    else:
        hits, misses = (hits, misses + 1) if misses < _MOST else (hits // 2, misses)
        if misses > hits:
            known, hits = token, 1
    return known << 8 | hits << 4 | misses
