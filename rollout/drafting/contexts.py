"""Drafts from the responses to all prompts: the token that followed the last few tokens, and its hit rate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from specrl.rollout.drafting.cost import MOST, emitted

_LENGTHS = (6, 4, 3)  # tokens of a context, longest first
_MOST = 15  # maximum of hits and misses, so that an entry adapts
_RATES, _SIZES = 5, 4  # levels of each length, by hit rate in quarters and by number of observations
_PER_PROMPT = 2  # responses learned for each prompt; further ones are similar
_MEMORY = 4000  # guesses over which a level's hit rate is averaged


class ContextTable:
    """Predicts the next token from the last ones, in the manner of TAGE branch prediction (Seznec and Michaud 2006).

    For each of a few lengths a table maps the last tokens to the token that followed, with its hits and misses; a
    different token replaces it when misses outnumber hits. The longest context with more than one hit decides. Its
    length, hit rate and number of observations are the *level* of the prediction. Texts are predicted before they are
    learned, so the hit rate of a level estimates the acceptance probability of a draft token. Only tokens that are
    likely enough to pay are drafted.

    Token Recycling (arXiv 2408.08696) and n-gram look-up store successors without a hit rate, so they cannot
    distinguish the template of a text from its numbers.

    Args:
        capacity: contexts of one generation, about 250 bytes each. A full generation becomes the old one, and contexts
            of the previous old generation that were not seen again are dropped.
    """

    def __init__(self, capacity: int = 1 << 17):
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Removes all contexts."""
        self._new: list[dict[tuple[int, ...], int]] = [{} for _ in _LENGTHS]  # token << 8 | hits << 4 | misses
        self._old: list[dict[tuple[int, ...], int]] = [{} for _ in _LENGTHS]
        self._right = [0.5] * (len(_LENGTHS) * _RATES * _SIZES)  # hits of each level; _guesses counts all predictions
        self._guesses = [2.0] * len(self._right)
        self._surest = 0.25

    def __len__(self) -> int:
        """Number of contexts."""
        return sum(map(len, (*self._new, *self._old)))

    def learn(self, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Learns the first few responses to each prompt from (prompt, response) token ids of one rollout."""
        responses: Counter[tuple[int, ...]] = Counter()
        chosen = []
        for prompt, tokens in texts:
            key = tuple(prompt)
            responses[key] += 1
            if responses[key] <= _PER_PROMPT:
                chosen.append(((*prompt[-_LENGTHS[0] :], *tokens), len(tokens)))
        for text, length in chosen:  # before any text is added, as rows of one rollout cannot draft from each other
            self._check(text, length)
        self._surest = max(right / guesses for right, guesses in zip(self._right, self._guesses, strict=True))
        for text, length in chosen:
            self._add(text, length)
        if sum(map(len, self._new)) > self.capacity:
            self._old, self._new = self._new, [{} for _ in _LENGTHS]

    def next(self, context: tuple[int, ...]) -> tuple[int, float] | None:
        """The predicted next token and its probability, or None for an unknown context.

        Args: context: the preceding tokens, prompt included. Only the last 6 are used.
        """
        guess = self._look_up(context)
        return guess and (guess[0], self._right[guess[1]] / self._guesses[guess[1]])

    def draft(self, context: Sequence[int], limit: int, price: float, beat: float = 0.0) -> tuple[list[int], float]:
        """Predicted next tokens, as long as the probability that all of them are accepted is at least `price`.

        Args:
            context: prompt and response so far.
            limit: maximum number of tokens.
            beat: a draft of no higher gain is not returned, and the search ends once it cannot be exceeded.

        Returns: The tokens, and their gain: the expected number of accepted tokens minus the price of all tokens.
        """
        tokens: list[int] = []
        context = tuple(context[-_LENGTHS[0] :])
        accepted = 1.0  # probability that all tokens are accepted
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
        """An upper bound on the gain of `limit` tokens after others that are accepted with probability `accepted`."""
        sure = min(self._surest, MOST)
        if accepted * sure < price:
            return 0.0
        k = min(limit, int(math.log(price / accepted) / math.log(sure))) if price > 0 else limit
        return accepted * (emitted(sure, k) - 1) - price * k + 1e-9  # a rounding error must not end the search

    def _look_up(self, context: tuple[int, ...]) -> tuple[int, int] | None:
        """The predicted token and its level."""
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
        """Predicts each of the last `length` tokens, and counts the hits of each level."""
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
    """The entry after `token` followed its context. A full count halves the other, so recent texts weigh more."""
    known, hits, misses = entry >> 8, entry >> 4 & _MOST, entry & _MOST
    if known == token:
        hits, misses = (hits + 1, misses) if hits < _MOST else (hits, misses // 2)
    else:
        hits, misses = (hits, misses + 1) if misses < _MOST else (hits // 2, misses)
        if misses > hits:
            known, hits = token, 1
    return known << 8 | hits << 4 | misses
