"""What a forward pass costs: a line through measured passes, and what passes brought for it."""

from __future__ import annotations

from collections.abc import Sequence

_FORGET = 0.98  # what is left of a pass's weight after the next one
_FADE = 0.85  # the same in a ledger, which must see when drafts begin to pay


class CostModel:
    """Seconds of a pass as a + r * rows + (b + c * width) * tokens: least squares over passes, with forgetting.

    A row costs more than a token: each has its own keys and values to read. A token attends to `width` positions.
    """

    def __init__(self):
        self._fixed, self._moving = [0.0] * 15, [0.0] * 15  # weighted sums of `_products`
        self._fitted: tuple[float, float, float, float] | None = None

    def fit(self) -> tuple[float, float, float, float]:
        """(a, r, b, c), none negative; a and what a token costs positive."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def observe(self, tokens: int, seconds: float, rows: int = 0, width: int = 0) -> None:
        new = _products(rows, tokens, width * tokens, seconds)
        self._moving = [_FORGET * old + x for old, x in zip(self._moving, new, strict=True)]
        self._fitted = None

    def calibrate(self, passes: Sequence[tuple[int, float]], rows: int = 0, width: int = 0) -> None:
        """Measured (tokens, seconds) that never fade: equal passes alone could not tell the terms apart."""
        for n, s in passes:
            new = _products(rows, n, width * n, s)
            self._fixed = [old + x for old, x in zip(self._fixed, new, strict=True)]
        self._fitted = None

    def _fit(self) -> tuple[float, float, float, float]:
        sums = iter(old + new for old, new in zip(self._fixed, self._moving, strict=True))
        matrix = [[0.0] * 5 for _ in range(5)]  # of (1, rows, tokens, width * tokens, seconds)
        for i in range(5):
            for j in range(i, 5):
                matrix[i][j] = matrix[j][i] = next(sums)
        if not matrix[0][0]:
            return 1.0, 0.0, 1e-3, 0.0
        terms, found = [i for i in range(4) if matrix[i][i]], [0.0] * 4
        while terms:
            solved = _solve([[matrix[i][j] for j in terms] for i in terms], [matrix[i][4] for i in terms])
            if min(solved) >= 0:
                for i, x in zip(terms, solved, strict=True):
                    found[i] = x
                break
            terms.pop(solved.index(min(solved)))
        a, row, token, place = found
        seconds, tokens = matrix[0][4] / matrix[0][0], matrix[0][2] / matrix[0][0]
        return max(a, 0.01 * seconds), row, token if token or place else 0.1 * seconds / tokens, place


class Ledger:
    """Seconds that passes took, and that plain passes are expected to take for as many tokens, with forgetting."""

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        self._spent = self._worth = self.passes = 0.0
        self.rows = 0
        """Of the first pass since."""

    def add(self, spent: float, worth: float, rows: int) -> None:
        kept, self.rows = _FADE, self.rows or rows
        self._spent, self._worth = kept * self._spent + spent, kept * self._worth + worth
        self.passes = kept * self.passes + 1

    def rate(self) -> float:
        """Spent by worth; 1 before any pass."""
        return self._spent / self._worth if self._worth else 1.0


def _products(*terms: float) -> list[float]:
    """Products of every two of (1, *terms)."""
    terms = (1.0, *terms)
    return [x * y for i, x in enumerate(terms) for y in terms[i:]]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x of matrix @ x = right, symmetric and positive; a trace of ridge splits terms that were never told apart."""
    size = len(right)
    rows = [[x * (1 + 1e-9 * (i == j)) for j, x in enumerate(row)] + [right[i]] for i, row in enumerate(matrix)]
    for i in range(size):
        for j in range(size):
            if i != j and rows[i][i]:
                factor = rows[j][i] / rows[i][i]
                rows[j] = [x - factor * y for x, y in zip(rows[j], rows[i], strict=True)]
    return [row[-1] / row[i] if row[i] else 0.0 for i, row in enumerate(rows)]
