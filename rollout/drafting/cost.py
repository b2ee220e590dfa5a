"""What a forward pass costs, fitted to measured passes, and whether passes with drafts bring more than they cost."""

from __future__ import annotations

from collections.abc import Sequence

PRIOR, WEIGHT = 0.9, 10.0
"""Acceptance before any draft was seen, and the draft tokens that this weighs: optimistic, soon outweighed."""
FORGET = 0.5
"""What is left of such counts at the next rollout: weights have changed, and optimism tries again."""
MOST = 0.9999
"""No estimate of a probability is trusted further."""
_FADE_FIT = 0.98  # what is left of a pass's weight after the next one
_FADE = 0.85  # the same in a trial, which must see when drafts begin to pay
_JUDGED = 3  # passes with drafts, by weight, that it takes to judge them
_GAIN = 0.9  # of a plain pass's time must do: passes with drafts take some that they are not charged
_CLEAR = 0.6  # of the seconds that plain passes are estimated to take
_REST = 31  # most passes in a row that nobody is asked about


def prior(fit: int, source: str) -> float:
    """Acceptance of a draft before any like it was seen; never more than PRIOR.

    A rule of thumb; what becomes of such drafts soon outweighs it.

    Args:
        fit: tokens before it that are the response's last ones; below 0, how many of the last few were others; 0 where
            nothing tells.
        source: where it comes from. A prompt is no response: what follows there seldom does here.
    """
    chance = max(0.05, PRIOR + 0.15 * fit) if fit <= 0 else min(PRIOR, fit / (fit + 1.5))
    return chance / 2 if source == "prompt" else chance


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
            self._fitted = _fit([old + new for old, new in zip(self._fixed, self._moving, strict=True)])
        return self._fitted

    def observe(self, tokens: int, seconds: float, rows: int = 0, width: int = 0) -> None:
        new = _products(rows, tokens, width * tokens, seconds)
        self._moving = [_FADE_FIT * old + x for old, x in zip(self._moving, new, strict=True)]
        self._fitted = None

    def calibrate(self, passes: Sequence[tuple[int, float]], rows: int = 0, width: int = 0) -> None:
        """Measured (tokens, seconds) that never fade: equal passes alone could not tell the terms apart."""
        for tokens, seconds in passes:
            new = _products(rows, tokens, width * tokens, seconds)
            self._fixed = [old + x for old, x in zip(self._fixed, new, strict=True)]
        self._fitted = None


class DraftingBackoff:
    """Whether asking for drafts brings tokens sooner than plain passes do, and when to ask again.

    What a plan expects is an estimate, and knows nothing of the time that asking takes. While asking does not pay, 3,
    15 and then 31 passes rest between two that are asked about. All is forgotten when half of the rows have ended, as
    few rows gain more.
    """

    def __init__(self):
        self._plain = [0.0] * 3  # passes, seconds, and what they were worth
        self.restart()

    def restart(self) -> None:
        """Drafts may be worth something else now; plain passes are what they were."""
        self._asked = [0.0] * 3
        self._rows = self._pause = self._skipped = 0

    def rests(self) -> bool:
        """Whether nobody is asked about the next pass."""
        rests = self._skipped < self._pause
        self._skipped += rests
        return rests

    def ask(self, carried: bool) -> None:
        """The next pass was asked about; whether anything rides in it."""
        self._skipped = 0
        if carried and self.pays():
            self._pause = 0
        elif carried and not self._plain[0]:
            self._pause = 1  # for the plain pass to compare with
        else:
            self._pause = min(4 * self._pause + 3, _REST)

    def observe(self, rows: int, seconds: float, worth: float, drafts: bool, asking: float | None) -> None:
        """A pass of `rows` rows took `seconds`, and plain passes take `worth` for what it emitted.

        Args: asking: seconds that asking about this very pass took, None if nobody was asked. It comes with the pass,
        as others may have been asked about since.
        """
        if asking is None and drafts:
            return  # the further passes of one that did not fit the memory
        if 2 * rows <= self._rows:
            self._plain = [0.0] * 3
            self.restart()
        self._rows = self._rows or rows
        sums, new = self._plain if asking is None else self._asked, (1.0, seconds + (asking or 0.0), worth)
        sums[:] = [_FADE * x + y for x, y in zip(sums, new, strict=True)]

    def pays(self) -> bool:
        """In doubt True. Unless drafts are clearly worth it, one plain pass is needed to compare with."""
        (plain, plain_s, plain_worth), (asked, asked_s, asked_worth) = self._plain, self._asked
        if asked < _JUDGED or asked_s <= _CLEAR * asked_worth:
            return True
        return plain > 0 and asked_s * plain_worth <= _GAIN * plain_s * asked_worth


def emitted(p: float, k: int) -> float:
    """Expected tokens of a pass with k draft tokens that are each accepted with probability p: 1 + p + ... + p^k."""
    p = min(p, MOST)
    return (1 - p ** (k + 1)) / (1 - p)


def _products(*terms: float) -> list[float]:
    """Products of every two of (1, *terms)."""
    terms = (1.0, *terms)
    return [x * y for i, x in enumerate(terms) for y in terms[i:]]


def _fit(products: Sequence[float]) -> tuple[float, float, float, float]:
    """(a, r, b, c) from sums of products of every two of (1, rows, tokens, width * tokens, seconds)."""
    rest = iter(products)
    upper = [[0.0] * i + [next(rest) for _ in range(i, 5)] for i in range(5)]
    passes, _, tokens, _, seconds = upper[0]
    if not passes:
        return 1.0, 0.0, 1e-3, 0.0
    terms, found = [i for i in range(4) if upper[i][i]], [0.0] * 4
    while terms:  # without the most negative term until none is
        solved = _solve([[upper[min(i, j)][max(i, j)] for j in terms] for i in terms], [upper[i][4] for i in terms])
        if min(solved) >= 0:
            for i, x in zip(terms, solved, strict=True):
                found[i] = x
            break
        terms.pop(solved.index(min(solved)))
    a, row, token, place = found
    return max(a, 0.01 * seconds / passes), row, token if token or place else 0.1 * seconds / tokens, place


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x of matrix @ x = right, symmetric and positive; a trace of ridge splits terms that were never told apart."""
    rows = [[x * (1 + 1e-9 * (i == j)) for j, x in enumerate(row)] + [right[i]] for i, row in enumerate(matrix)]
    for i, pivot in enumerate(rows):
        for j, row in enumerate(rows):
            if i != j and pivot[i]:
                factor = row[i] / pivot[i]
                rows[j] = [x - factor * y for x, y in zip(row, pivot, strict=True)]
    return [row[-1] / row[i] if row[i] else 0.0 for i, row in enumerate(rows)]
