"""The draft model's cost and acceptance estimates, and the stopping rule of its chain drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrl.rollout.drafting.cost import FORGET, PRIOR, WEIGHT, CostModel, emitted

LONG = 32
"""Longest chain that the budget considers."""
_MEMORY = 128  # draft tokens over which `promise` averages
_LEVELS = 10  # of confidence; level i starts at probability 1 - 2^-i


class DraftModelRecord(CostModel):
    """Estimates the cost of a pass of the draft model, and the acceptance of its tokens."""

    def __init__(self):
        super().__init__()
        self._levels = [[0.0, 0.0] for _ in range(_LEVELS)]  # accepted and rejected draft tokens
        self._drafted = [0.0, 0.0]  # expected accepted tokens, and all draft tokens

    def confidence(self, logprob: float) -> float:
        """Estimated acceptance probability of a draft token, from past tokens of the same confidence level."""
        level = _level(logprob)
        accepted, rejected = self._levels[level]
        weight = 4.0  # of the model's confidence as a prior, in draft tokens
        return (accepted + weight * (1 - 0.75 * 2.0**-level)) / (accepted + rejected + weight)

    def promise(self) -> float:
        """Expected acceptance of one more token, where tokens that are not worth verifying count as 0."""
        accepted, drafted = self._drafted
        return (accepted + WEIGHT * PRIOR) / (drafted + WEIGHT)

    def observe_promise(self, acceptances: float, drafted: int) -> None:
        """Records `drafted` tokens, of which `acceptances` are expected to be verified and accepted."""
        kept = max(0.0, 1 - drafted / _MEMORY)
        self._drafted = [kept * self._drafted[0] + acceptances, kept * self._drafted[1] + drafted]

    def observe_chain(self, logprobs: Sequence[float], accepted: int) -> None:
        """Records a row's draft with these log-probs, of which the first `accepted` tokens were accepted."""
        for i, logprob in enumerate(logprobs[: accepted + 1]):
            self._levels[_level(logprob)][i >= accepted] += 1

    def next_rollout(self) -> None:
        """Halves all counts, because the weights have changed."""
        for seen in (*self._levels, self._drafted):
            seen[:] = [FORGET * x for x in seen]


class Chain:
    """Stops a row when one more token does not pay, and all rows when one more pass of the draft model does not.

    A token is kept while the probability that all tokens of the row's draft are accepted is at least the cost of
    verifying the token. One more pass over the remaining rows must yield more expected tokens than its time is worth.

    Args:
        record: estimates for the draft model.
        goodput: tokens that a second is worth; with 0 every token and pass pays.
        token_s: seconds that the policy takes to verify a token.
        missing: tokens of each row that the draft model must read first; the gain of one chain must cover their cost.
        most: maximum draft length, 0 for no limit.
    """

    def __init__(self, record: DraftModelRecord, goodput: float, token_s: float, missing: Sequence[int], most: int = 0):
        self._record = record
        self._goodput = goodput
        self._steps_left = most or 1 << 30
        self._verify_s = token_s
        self._pass_s, row, token, _ = record.fit()
        self._row_s = row + token
        self._accepted = [1.0] * len(missing)  # probability that all draft tokens of the row are accepted
        self.logprobs: list[list[float]] = [[] for _ in missing]
        gain = emitted(record.promise(), most or LONG) - 1
        self.active = self._worth([i for i, n in enumerate(missing) if gain >= goodput * token * n])
        """Rows that draft one more token."""

    def step(self, logprobs: Sequence[float], limits: Sequence[int]) -> list[int]:
        """Records one draft token with its log-prob for each `active` row, and updates `active`.

        Args:
            logprobs: NaN ends the row's draft.
            limits: maximum draft length of each row.

        Returns: The rows that keep their token.
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
        """The rows for which one more token pays, or none if one more pass does not pay."""
        promise = self._record.promise()
        price = self._goodput * (self._row_s + self._verify_s)
        rows = [row for row in rows if self._accepted[row] * promise >= price]
        gain = promise * sum(self._accepted[row] for row in rows) - price * len(rows)
        return rows if gain >= self._goodput * self._pass_s else []


def _level(logprob: float) -> int:
    doubt = -math.expm1(min(logprob, 0.0))
    return min(int(-math.log2(doubt)), _LEVELS - 1) if doubt > 0 else _LEVELS - 1
