"""A draft model's record, and when its chain drafts stop."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrl.rollout.drafting.cost import FORGET, PRIOR, WEIGHT, CostModel, emitted

LONG = 32
"""Tokens of the longest chain that is counted on."""
_MEMORY = 128  # draft tokens over which the promise is averaged
_LEVELS = 10  # of confidence: level i holds probabilities from 1 - 2^-i on


class DraftModelRecord(CostModel):
    """What a pass of the draft model costs, and how often its tokens stand."""

    def __init__(self):
        super().__init__()
        self._levels = [[0.0, 0.0] for _ in range(_LEVELS)]  # draft tokens that were accepted, and that were not
        self._drafted = [0.0, 0.0]  # tokens expected to be accepted, and all

    def confidence(self, logprob: float) -> float:
        """Estimated probability that a draft token is accepted: what became of equally confident ones."""
        level = _level(logprob)
        accepted, rejected = self._levels[level]
        weight = 4.0  # before any were seen, the model's own word
        return (accepted + weight * (1 - 0.75 * 2.0**-level)) / (accepted + rejected + weight)

    def promise(self) -> float:
        """Expected acceptance of one more token, those that are not worth carrying counted as 0."""
        accepted, drafted = self._drafted
        return (accepted + WEIGHT * PRIOR) / (drafted + WEIGHT)

    def observe_promise(self, acceptances: float, drafted: int) -> None:
        """It drafted `drafted` tokens; those worth carrying are expected to give `acceptances` tokens."""
        kept = max(0.0, 1 - drafted / _MEMORY)
        self._drafted = [kept * self._drafted[0] + acceptances, kept * self._drafted[1] + drafted]

    def observe_chain(self, logprobs: Sequence[float], accepted: int) -> None:
        """A row carried tokens that it gave `logprobs`; the first `accepted` stood."""
        for i, logprob in enumerate(logprobs[: accepted + 1]):
            self._levels[_level(logprob)][i >= accepted] += 1

    def next_rollout(self) -> None:
        """Weights have changed: trust the past half as much."""
        for seen in (*self._levels, self._drafted):
            seen[:] = [FORGET * x for x in seen]


class Chain:
    """Stops each row of a chain draft where one more token would not pay, and the chain where one more pass would not.

    A row's token is carried while the chance that all its tokens stand exceeds what verifying it costs. Another pass of
    the model over the rows that go on must promise more tokens than its seconds are worth.

    Args:
        record: of the draft model.
        goodput: tokens that a second is worth; 0 finds everything worth it.
        token_s: seconds that the policy takes to verify a token.
        behind: tokens of each row that the model must run first; one chain must bring in what that costs.
        most: tokens of the longest draft, 0 without limit.
    """

    def __init__(self, record: DraftModelRecord, goodput: float, token_s: float, behind: Sequence[int], most: int = 0):
        self._record, self._goodput, self._left = record, goodput, most or 1 << 30
        self._verify = token_s
        self._fixed, row, token, _ = record.fit()
        self._row = row + token
        self._stands = [1.0] * len(behind)
        self.logprobs: list[list[float]] = [[] for _ in behind]
        brings = emitted(record.promise(), most or LONG) - 1
        self.going = self._worth([i for i, n in enumerate(behind) if brings >= goodput * token * n])
        """Rows that draft one more token."""

    def step(self, logprobs: Sequence[float], room: Sequence[int]) -> list[int]:
        """The rows `going` drafted one token each with `logprobs`; NaN ends a row. Returns the rows that carry theirs.

        Args: room: how many more tokens each row of the batch may carry.
        """
        carried, promise = [], 0.0
        for row, logprob in zip(self.going, logprobs, strict=True):
            p = self._record.confidence(logprob) if logprob == logprob else 0.0
            self._stands[row] *= p
            if logprob == logprob and self._stands[row] >= self._goodput * self._verify:
                carried.append(row)
                self.logprobs[row].append(logprob)
                promise += p
        self._record.observe_promise(promise, len(self.going))
        self._left -= 1
        self.going = self._worth([row for row in carried if room[row] > len(self.logprobs[row])] if self._left else [])
        return carried

    def _worth(self, rows: list[int]) -> list[int]:
        promise, price = self._record.promise(), self._goodput * (self._row + self._verify)
        rows = [row for row in rows if self._stands[row] * promise >= price]
        gain = promise * sum(self._stands[row] for row in rows) - price * len(rows)
        return rows if gain >= self._goodput * self._fixed else []


def _level(logprob: float) -> int:
    doubt = -math.expm1(min(logprob, 0.0))
    return min(int(-math.log2(doubt)), _LEVELS - 1) if doubt > 0 else _LEVELS - 1
