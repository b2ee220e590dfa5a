"""Fits the cost of a forward pass to measured passes, and decides whether drafting saves more than it costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PRIOR, WEIGHT = 0.9, 10.0
"""Prior acceptance probability, and its weight in draft tokens. It is optimistic but soon outweighed."""
FORGET = 0.5
"""Factor on all counts at the next rollout: the weights have changed, so the prior should count more again."""
MOST = 0.9999
"""Highest estimate of a probability."""
_FADE_FIT = 0.98  # factor on the weight of past passes at each pass
_FADE = 0.85  # the same in DraftingBackoff, which must see when drafts begin to pay
_JUDGED = 3  # total weight of passes with drafts that is needed to evaluate them
_GAIN = 0.9  # maximum relative time with drafts, as their passes cost more than is measured
_CLEAR = 0.6  # relative to the estimated time without drafts, below which drafting clearly pays
_MOST_SKIPPED = 31  # consecutive passes without drafting


def prior(match: int, source: str) -> float:
    """Prior acceptance of a draft, at most PRIOR. It is a heuristic that observed drafts soon outweigh.

    Args:
        match: the number of tokens preceding the draft that equal the response's last tokens; if negative, how many of
            the last few tokens differ; 0 if neither is known.
        source: source of the draft. Text that follows in the prompt seldom follows in a response.
    """
    chance = max(0.05, PRIOR + 0.15 * match) if match <= 0 else min(PRIOR, match / (match + 1.5))
    return chance / 2 if source == "prompt" else chance


class CostModel:
    """Seconds of a pass as a + r * rows + (b + c * width) * tokens, by least squares over passes with forgetting.

    A row costs more than a token because its KV cache must be read. A token attends to `width` positions.
    """

    def __init__(self) -> None:
        self._fixed = np.zeros((5, 5))  # sums of `_products` of calibration passes; `_moving`: of observed passes
        self._moving = np.zeros((5, 5))
        self._fitted: tuple[float, float, float, float] | None = None

    def fit(self) -> tuple[float, float, float, float]:
        """(a, r, b, c), all non-negative. a and the cost of a token are positive."""
        if self._fitted is None:
            self._fitted = _fit(self._fixed + self._moving)
        return self._fitted

    def observe(self, tokens: int, seconds: float, rows: int = 0, width: int = 0) -> None:
        self._moving = _FADE_FIT * self._moving + _products(rows, tokens, width, seconds)
        self._fitted = None

    def calibrate(self, passes: Sequence[tuple[int, float]], rows: int = 0, width: int = 0) -> None:
        """Records (tokens, seconds) that are never forgotten, since the terms cannot be fitted to equal passes."""
        self._fixed += sum(_products(rows, tokens, width, seconds) for tokens, seconds in passes)
        self._fitted = None


class DraftingBackoff:
    """Decides whether passes with drafts emit tokens faster than plain passes, and when to try drafts again.

    A plan is an estimate that does not include the time taken to get drafts. While drafting does not pay, 3, 15 and
    then 31 plain passes run before the next pass with drafts. The measurements are reset when half of the rows have
    finished, as fewer rows gain more.
    """

    def __init__(self):
        self._plain = [0.0] * 3  # passes, seconds, and seconds that plain passes would take for the same tokens
        self.restart()

    def restart(self) -> None:
        """Resets the measurements of passes with drafts, whose gain may have changed. Plain passes cost the same."""
        self._asked = [0.0] * 3
        self._rows = 0
        self._pause = 0
        self._skipped = 0

    def should_skip(self) -> bool:
        """Whether the next pass runs without drafting."""
        skip = self._skipped < self._pause
        self._skipped += skip
        return skip

    def observe_asking(self, drafted: bool) -> None:
        """Records that drafters were called for the next pass. Args: drafted: at least one row has a draft."""
        self._skipped = 0
        if drafted and self.pays():
            self._pause = 0
        elif drafted and not self._plain[0]:
            self._pause = 1  # one plain pass is needed as the baseline
        else:
            self._pause = min(4 * self._pause + 3, _MOST_SKIPPED)

    def observe(self, rows: int, seconds: float, worth: float, asking: float | None) -> None:
        """Records a pass of `rows` rows that took `seconds`.

        Args:
            worth: seconds that plain passes would take for the same number of tokens.
            asking: seconds taken to get the drafts of this pass, None if no drafter was called. It is an argument
                because drafters may have been called for other passes since. A pass without is the baseline, also if
                vLLM's draft model has drafted for it.
        """
        if 2 * rows <= self._rows:
            self._plain = [0.0] * 3
            self.restart()
        self._rows = self._rows or rows
        sums = self._plain if asking is None else self._asked
        new = 1.0, seconds + (asking or 0.0), worth
        sums[:] = [_FADE * x + y for x, y in zip(sums, new, strict=True)]

    def pays(self) -> bool:
        """Whether drafting pays; True if unknown. Unless it clearly pays, a plain pass is needed as the baseline."""
        plain, plain_s, plain_worth = self._plain
        asked, asked_s, asked_worth = self._asked
        if asked < _JUDGED or asked_s <= _CLEAR * asked_worth:
            return True
        return plain > 0 and asked_s * plain_worth <= _GAIN * plain_s * asked_worth


def emitted(p: float, k: int) -> float:
    """Expected tokens of a pass with k draft tokens that are each accepted with probability p: 1 + p + ... + p^k."""
    p = min(p, MOST)
    return (1 - p ** (k + 1)) / (1 - p)


def _products(rows: int, tokens: int, width: int, seconds: float) -> NDArray[np.float64]:
    """The products of each two of 1, rows, tokens, width * tokens and seconds [5, 5]."""
    terms = np.array([1.0, rows, tokens, width * tokens, seconds])
    return np.outer(terms, terms)


def _fit(products: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """(a, r, b, c) from the sums of `_products`."""
    passes, _, tokens, _, seconds = products[0].tolist()
    if not passes:
        return 1.0, 0.0, 1e-3, 0.0
    terms = np.flatnonzero(products[0, :4])
    solution = np.zeros(4)
    while len(terms):  # removes the most negative term until none is negative
        among = products[np.ix_(terms, terms)]
        ridge = np.diag(1e-9 * among.diagonal())  # separates terms that always occurred together
        solved = np.linalg.solve(among + ridge, products[terms, 4])
        if solved.min() >= 0:
            solution[terms] = solved
            break
        terms = np.delete(terms, solved.argmin())
    a, row, token, position = solution.tolist()
    token_s = token if token or position else 0.1 * seconds / tokens
    return max(a, 0.01 * seconds / passes), row, token_s, position
