"""A draft model's record, and when its chain drafts stop."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrl.rollout.drafting.cost import FORGET, PRIOR, WEIGHT, CostModel, emitted

LONG = 32
"""Tokens of the longest chain that the budget plans with."""
_MEMORY = 128  # draft tokens over which the promise is averaged
_LEVELS = 10  # of confidence: level i holds probabilities from 1 - 2^-i on


class DraftModelRecord(CostModel):
    """What a pass of the draft model costs, and how often its tokens are accepted."""

    def __init__(self):
        super().__init__()
        self._levels = [[0.0, 0.0] for _ in range(_LEVELS)]  # draft tokens that were accepted, and that were not
        self._drafted = [0.0, 0.0]  # tokens expected to be accepted, and all

    def confidence(self, logprob: float) -> float:
        """Estimated probability that a draft token is accepted, from equally confident ones."""
        level = _level(logprob)
        accepted, rejected = self._levels[level]
        weight = 4.0  # of the model's own confidence, in draft tokens
        return (accepted + weight * (1 - 0.75 * 2.0**-level)) / (accepted + rejected + weight)

    def promise(self) -> float:
        """Expected acceptance of one more token, those that are not worth verifying counted as 0."""
        accepted, drafted = self._drafted
        return (accepted + WEIGHT * PRIOR) / (drafted + WEIGHT)

    def observe_promise(self, acceptances: float, drafted: int) -> None:
        """It drafted `drafted` tokens; of those worth verifying, `acceptances` are expected to be accepted."""
        kept = max(0.0, 1 - drafted / _MEMORY)
        self._drafted = [kept * self._drafted[0] + acceptances, kept * self._drafted[1] + drafted]

    def observe_chain(self, logprobs: Sequence[float], accepted: int) -> None:
        """A row drafted tokens with these log-probs; the first `accepted` were accepted."""
        for i, logprob in enumerate(logprobs[: accepted + 1]):
            self._levels[_level(logprob)][i >= accepted] += 1

    def next_rollout(self) -> None:
        """Weights have changed, so past counts weigh half."""
        for seen in (*self._levels, self._drafted):
            seen[:] = [FORGET * x for x in seen]


class Chain:
    """Stops each row of a chain draft where one more token would not pay, and the chain where one more pass would not.

    A row's token is kept while the probability that all its tokens are accepted exceeds what verifying it costs.
    Another pass of the model over the rows that go on must promise more tokens than its seconds are worth.

    Args:
        record: of the draft model.
        goodput: tokens that a second is worth; 0 finds everything worth it.
        token_s: seconds that the policy takes to verify a token.
        missing: tokens of each row that the model must read first; one chain must gain what that costs.
        most: tokens of the longest draft, 0 without limit.
    """

    def __init__(self, record: DraftModelRecord, goodput: float, token_s: float, missing: Sequence[int], most: int = 0):
        self._record = record
        self._goodput = goodput
        self._steps_left = most or 1 << 30
        self._verify_s = token_s
        self._pass_s, row, token, _ = record.fit()
        self._row_s = row + token
        self._accepted = [1.0] * len(missing)  # probability that all tokens of the row are accepted
        self.logprobs: list[list[float]] = [[] for _ in missing]
        gain = emitted(record.promise(), most or LONG) - 1
        self.active = self._worth([i for i, n in enumerate(missing) if gain >= goodput * token * n])
        """Rows that draft one more token."""

    def step(self, logprobs: Sequence[float], limits: Sequence[int]) -> list[int]:
        """The `active` rows drafted one token each with `logprobs`; NaN ends a row. Returns the rows that keep theirs.

        Args: limits: most tokens of each row's draft.
        """
        kept = []
        promise = 0.0
        for row, logprob in zip(self.active, logprobs, strict=True):
            p = self._record.confidence(logprob) if logprob == logprob else 0.0
            self._accepted[row] *= p
            if logprob == logprob and self._accepted[row] >= self._goodput * self._verify_s:
                kept.append(row)
                self.logprobs[row].append(logprob)
                promise += p
        self._record.observe_promise(promise, len(self.active))
        self._steps_left -= 1
        unfinished = [row for row in kept if limits[row] > len(self.logprobs[row])]
        self.active = self._worth(unfinished if self._steps_left else [])
        return kept

    def _worth(self, rows: list[int]) -> list[int]:
        """Those of the rows that are worth another token; none if the pass is not worth its seconds."""
        promise = self._record.promise()
        price = self._goodput * (self._row_s + self._verify_s)
        rows = [row for row in rows if self._accepted[row] * promise >= price]
        gain = promise * sum(self._accepted[row] for row in rows) - price * len(rows)
        return rows if gain >= self._goodput * self._pass_s else []


def _level(logprob: float) -> int:
    doubt = -math.expm1(min(logprob, 0.0))
    return min(int(-math.log2(doubt)), _LEVELS - 1) if doubt > 0 else _LEVELS - 1
