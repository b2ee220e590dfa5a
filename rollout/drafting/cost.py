"""Fits the cost of a forward pass to measured passes, and keeps account of what drafting saves and loses."""

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
_STALE = 1 / 8  # of the passes are new to a fit, which takes as long as ten records
SHARE = 0.008
"""Of a rollout's seconds may be lost on drafts that do not pay."""


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
        self._fitted_at = 0  # passes that were recorded when it was fitted
        self.observed = 0
        """Passes that were recorded, other than those of the calibration."""

    def fit(self) -> tuple[float, float, float, float]:
        """(a, r, b, c), all non-negative. a and the cost of a token are positive."""
        if self._fitted is None or self.observed - self._fitted_at > _STALE * self._moving[0, 0]:
            self._fitted = _fit(self._fixed + self._moving)
            self._fitted_at = self.observed
        return self._fitted

    def observe(self, tokens: int, seconds: float, rows: int = 0, width: int = 0) -> None:
        self._moving = _FADE_FIT * self._moving + _products(rows, tokens, width, seconds)
        self.observed += 1

    def calibrate(self, passes: Sequence[tuple[int, float]], rows: int = 0, width: int = 0) -> None:
        """Records (tokens, seconds) that are never forgotten, since the terms cannot be fitted to equal passes."""
        self._fixed += sum(_products(rows, tokens, width, seconds) for tokens, seconds in passes)
        self._fitted = None


class Account:
    """Seconds that drafts may lose.

    A pass with drafts pays in what it saved, or takes out what it lost, the time to get the drafts included. Every pass
    pays in `SHARE` of its seconds. While the account is empty nothing is drafted and no drafter is asked. So a rollout
    loses at most `SHARE` of its time, what its drafts have saved before, and what it begins with: the seconds of a
    pass, or half of what the drafts of earlier rollouts have saved.
    """

    def __init__(self) -> None:
        self.balance_s = 0.0
        self.pass_s = 0.0
        """Of the shortest pass."""
        self._saved_s = 0.0  # by the drafts of this rollout
        self._open = True

    def open(self) -> None:
        """A rollout with drafts begins. A debt is forgotten, as the machine may have stalled in a pass with drafts."""
        self._open = True
        self._saved_s = 0.0
        self.balance_s = max(self.pass_s, FORGET * self.balance_s)

    def close(self) -> float:
        """The rollout has ended; plain rollouts, which pay in nothing, may follow.

        Returns the seconds that its drafts cost beyond what they saved, 0 if they saved some.
        """
        self._open = False
        lost_s = max(0.0, -self._saved_s)
        self._saved_s = 0.0
        return lost_s

    def observe(self, seconds: float, saved_s: float) -> None:
        """Records a pass that took `seconds`, and the seconds that its drafts saved, negative if they lost some."""
        if self._open:
            self.balance_s += SHARE * seconds + saved_s
            self._saved_s += saved_s


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
