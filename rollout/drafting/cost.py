"""What a forward pass costs, fitted to measured passes, and whether drafting gains more than it costs."""

from __future__ import annotations

from collections.abc import Sequence

PRIOR, WEIGHT = 0.9, 10.0
"""Acceptance before any draft was seen, and the weight of this prior in draft tokens: optimistic, soon outweighed."""
FORGET = 0.5
"""Share of the counts that is kept for the next rollout: weights have changed, and the prior gains influence again."""
MOST = 0.9999
"""Highest estimate of a probability."""
_FADE_FIT = 0.98  # of a pass's weight after the next pass
_FADE = 0.85  # the same in DraftingBackoff, which must see when drafts begin to pay
_JUDGED = 3  # passes with drafts, by weight, that it takes to judge them
_GAIN = 0.9  # of a plain pass's time must suffice: passes with drafts cost more than they are charged
_CLEAR = 0.6  # of the seconds that plain passes are estimated to take, and drafting clearly pays
_MOST_SKIPPED = 31  # passes in a row without drafting


def prior(match: int, source: str) -> float:
    """Acceptance of a draft before any like it was seen; never more than PRIOR.

    A rule of thumb, which the acceptance of such drafts soon outweighs.

    Args:
        match: tokens before it that equal the response's last ones; below 0, how many of the last few differ; 0 where
            neither is known.
        source: where it comes from. A prompt is no response, so what follows there seldom follows here.
    """
    chance = max(0.05, PRIOR + 0.15 * match) if match <= 0 else min(PRIOR, match / (match + 1.5))
    return chance / 2 if source == "prompt" else chance


class CostModel:
    """Seconds of a pass as a + r * rows + (b + c * width) * tokens: least squares over passes, with forgetting.

    A row costs more than a token, as each has its own keys and values to read. A token attends to `width` positions.
    """

    def __init__(self):
        self._fixed = [0.0] * 15  # weighted sums of `_products`, of calibration and of observed passes
        self._moving = [0.0] * 15
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
        """Measured (tokens, seconds) that never fade: equal passes alone cannot separate the terms."""
        for tokens, seconds in passes:
            new = _products(rows, tokens, width * tokens, seconds)
            self._fixed = [old + x for old, x in zip(self._fixed, new, strict=True)]
        self._fitted = None


class DraftingBackoff:
    """Whether asking for drafts emits tokens faster than plain passes do, and when to ask again.

    A plan is an estimate, and does not include the time that asking takes. While asking does not pay, 3, 15 and then
    31 passes run without drafting between two that draft. The counts are reset when half of the rows have ended, as
    few rows gain more.
    """

    def __init__(self):
        self._plain = [0.0] * 3  # passes, seconds, and the seconds of plain passes for what they emitted
        self.restart()

    def restart(self) -> None:
        """The gain of drafts may have changed; the cost of plain passes has not."""
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
        """Drafters were asked for the next pass. Args: drafted: it carries a draft."""
        self._skipped = 0
        if drafted and self.pays():
            self._pause = 0
        elif drafted and not self._plain[0]:
            self._pause = 1  # for a plain pass to compare with
        else:
            self._pause = min(4 * self._pause + 3, _MOST_SKIPPED)

    def observe(self, rows: int, seconds: float, worth: float, drafts: bool, asking: float | None) -> None:
        """A pass of `rows` rows took `seconds`; plain passes would take `worth` seconds for what it emitted.

        Args: asking: seconds that asking for the drafts of this pass took, None if no drafter was asked. It belongs to
        the pass, as drafters may have been asked for other passes since.
        """
        if asking is None and drafts:
            return  # a further pass of a batch that did not fit one pass
        if 2 * rows <= self._rows:
            self._plain = [0.0] * 3
            self.restart()
        self._rows = self._rows or rows
        sums = self._plain if asking is None else self._asked
        new = 1.0, seconds + (asking or 0.0), worth
        sums[:] = [_FADE * x + y for x, y in zip(sums, new, strict=True)]

    def pays(self) -> bool:
        """True in doubt. Unless drafts clearly pay, one plain pass is needed to compare with."""
        plain, plain_s, plain_worth = self._plain
        asked, asked_s, asked_worth = self._asked
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
    terms = [i for i in range(4) if upper[i][i]]
    solution = [0.0] * 4
    while terms:  # drops the most negative term until none is negative
        solved = _solve([[upper[min(i, j)][max(i, j)] for j in terms] for i in terms], [upper[i][4] for i in terms])
        if min(solved) >= 0:
            for i, x in zip(terms, solved, strict=True):
                solution[i] = x
            break
        terms.pop(solved.index(min(solved)))
    a, row, token, position = solution
    token_s = token if token or position else 0.1 * seconds / tokens
    return max(a, 0.01 * seconds / passes), row, token_s, position


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x of matrix @ x = right, symmetric and positive; a tiny ridge separates terms that only occurred together."""
    rows = [[x * (1 + 1e-9 * (i == j)) for j, x in enumerate(row)] + [right[i]] for i, row in enumerate(matrix)]
    for i, pivot in enumerate(rows):
        for j, row in enumerate(rows):
            if i != j and pivot[i]:
                factor = row[i] / pivot[i]
                rows[j] = [x - factor * y for x, y in zip(row, pivot, strict=True)]
    return [row[-1] / row[i] if row[i] else 0.0 for i, row in enumerate(rows)]
