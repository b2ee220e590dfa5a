"""How many draft tokens each row carries in the next pass: as many as pay for themselves, none if drafting loses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["start", "agreeing", "diverged", "silent"]
"""What is known of a row's drafter: nothing yet, its last draft was accepted whole, or rejected, or it had none."""

_PRIOR = (9.0, 1.0)  # accepted and rejected draft tokens assumed before any were seen: optimistic, soon outweighed
_FORGET_PASS = 0.98
_FORGET_ROLLOUT = 0.5
_PROBE_EVERY, _PROBE_TOKENS, _PROBE_ROWS = 32, 2, 4
_LEVELS = 10  # of a draft model's confidence: level i holds probabilities from 1 - 2^-i on


class Line:
    """Seconds of a pass as a + b * tokens: least squares over measured passes, with forgetting."""

    def __init__(self):
        # weight, sum n, sum s, sum n^2, sum n*s over passes of n tokens that took s seconds
        self._fixed, self._moving = [0.0] * 5, [0.0] * 5

    def fit(self) -> tuple[float, float]:
        """(a, b), both kept positive."""
        weight, n, s, nn, ns = (fixed + moving for fixed, moving in zip(self._fixed, self._moving, strict=True))
        if not weight:
            return 1.0, 1e-3
        spread = nn - n * n / weight
        b = max((ns - n * s / weight) / spread, 0.0) if spread > 0 else 0.0
        b = min(b, s / n) if b else 0.1 * s / n
        return max((s - b * n) / weight, 0.01 * s / weight), b

    def observe(self, tokens: int, seconds: float) -> None:
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._moving = [_FORGET_PASS * old + x for old, x in zip(self._moving, new, strict=True)]

    def calibrate(self, passes: Sequence[tuple[int, float]]) -> None:
        """Measured (tokens, seconds) that never fade: equal passes alone could not tell a from b."""
        for n, s in passes:
            self._fixed = [old + x for old, x in zip(self._fixed, (1.0, n, s, n * n, n * s), strict=True)]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the rows of the next pass carry."""

    windows: Mapping[str, int]
    """Tokens that a row in each state may carry from its own drafter."""
    handed: frozenset[str]
    """States whose rows the draft model serves better than their own drafters."""
    goodput: float
    """Expected tokens per second: what a second is worth."""


class Budget:
    """Goodput controller: maximises expected tokens per second of a pass (SmartSpec, arXiv 2406.14066).

    A pass with n tokens costs a + b * n seconds, fitted to measured passes with forgetting. A draft of k tokens whose
    tokens are each accepted with probability p emits 1 + p + ... + p^k tokens in expectation, p estimated per state.
    Maximising sum_i emitted_i / (a + sum_i (b + c_i k_i)) gives the rule "draft the j-th token of a row while
    p^j >= c_i * goodput", solved by fixed-point iteration (Dinkelbach). A token of a row's own drafter costs c = b; one
    of the draft model costs its share of the model's pass as well, so that few rows make it dear and many make
    verification dear; `chain` decides token by token with the model's own confidence.

    Args: window: draft tokens per row and pass; 0 decides by goodput.
    """

    def __init__(self, window: int = 0):
        self.window = window
        self.drafter = Line()
        """Cost of a pass of the draft model."""
        self._passes = Line()
        self._seen = {state: [0.0, 0.0] for state in ("start", "agreeing", "diverged")}
        self._levels = [[0.0, 0.0] for _ in range(_LEVELS)]
        self._yield = [0.0, 0.0]
        self._idle = self._idle_model = 0

    # What was measured -------------------------------------------------------------------------------------------

    def acceptance(self, state: State) -> float:
        """Estimated probability that one more draft token of a row in `state` is accepted."""
        if state == "silent":
            return 0.0
        accepted, rejected = (seen + prior for seen, prior in zip(self._seen[state], _PRIOR, strict=True))
        return accepted / (accepted + rejected)

    def confidence(self, logprob: float) -> float:
        """Estimated probability that a model's draft token is accepted: what became of equally confident ones."""
        level = _level(logprob)
        accepted, rejected = self._levels[level]
        weight = sum(_PRIOR)  # before any were seen, the model's own word
        return (accepted + weight * (1 - 0.75 * 2.0**-level)) / (accepted + rejected + weight)

    def model_yield(self) -> float:
        """Expected acceptance of one more token of the draft model, those it is not confident of counted as 0."""
        worth, drafted = (seen + prior for seen, prior in zip(self._yield, (_PRIOR[0], sum(_PRIOR)), strict=True))
        return worth / drafted

    def cost(self) -> tuple[float, float]:
        """Seconds per pass and per token (a, b)."""
        return self._passes.fit()

    def observe_pass(self, tokens: int, seconds: float) -> None:
        """One forward pass of `tokens` tokens took `seconds`, drawing included."""
        self._passes.observe(tokens, seconds)

    def calibrate(self, passes: Sequence[tuple[int, float]]) -> None:
        """Measured (tokens, seconds) of passes, see Line.calibrate."""
        self._passes.calibrate(passes)

    def observe_draft(self, state: State, drafted: int, accepted: int) -> None:
        """A row in `state` carried `drafted` tokens of its own drafter, the first `accepted` of which stood."""
        self._seen[state][0] += accepted
        self._seen[state][1] += accepted < drafted

    def observe_promise(self, acceptances: float, drafted: int) -> None:
        """The model drafted `drafted` tokens; those worth carrying are expected to give `acceptances` tokens."""
        self._yield = [self._yield[0] + acceptances, self._yield[1] + drafted]

    def observe_chain(self, logprobs: Sequence[float], accepted: int) -> None:
        """A row carried tokens that the draft model gave `logprobs`; the first `accepted` stood."""
        for i, logprob in enumerate(logprobs[: accepted + 1]):
            self._levels[_level(logprob)][i >= accepted] += 1

    def next_rollout(self) -> None:
        """Weights have changed: trust the past half as much, so that a bad spell is probed again."""
        self._seen = {state: [_FORGET_ROLLOUT * x for x in seen] for state, seen in self._seen.items()}
        self._levels = [[_FORGET_ROLLOUT * x for x in seen] for seen in self._levels]
        self._yield = [_FORGET_ROLLOUT * x for x in self._yield]

    # What to draft -----------------------------------------------------------------------------------------------

    def windows(self, states: Sequence[State]) -> list[int]:
        """Draft tokens for each active row in the next pass, without a draft model."""
        windows = self.plan(states).windows
        return [windows[s] for s in states]

    def plan(self, states: Sequence[State], model: bool = False) -> Plan:
        """Draft lengths per state, and the states that a draft model serves better, where there is a `model`.

        A probe now and then keeps a bad spell from lasting.
        """
        count = Counter(states)
        if self.window:
            return Plan(dict.fromkeys(count, self.window), frozenset(), 0.0)
        worst_first = sorted(count, key=self.acceptance)
        handed = [worst_first[:i] for i in range(len(worst_first) + 1)] if model else [[]]
        best = max((self._solve(count, frozenset(states)) for states in handed), key=lambda plan: plan.goodput)
        self._idle = 0 if model or any(best.windows.values()) else self._idle + 1
        if self._idle == _PROBE_EVERY:
            self._idle = 0
            return Plan(dict.fromkeys(count, _PROBE_TOKENS), frozenset(), best.goodput)
        return best

    def _solve(self, count: Mapping[str, int], handed: frozenset[str]) -> Plan:
        """The best draft lengths when the rows in the states `handed` are drafted by the model."""
        a, b = self.cost()
        p = {state: min(self.acceptance(state), 0.9999) for state in count}
        price = dict.fromkeys(count, b)
        if rows := sum(count[state] for state in handed):
            fixed, token = self.drafter.fit()
            p |= dict.fromkeys(handed, min(self.model_yield(), 0.9999))
            price |= dict.fromkeys(handed, b + token + fixed / rows)
        k = dict.fromkeys(count, 0)
        for _ in range(8):
            emitted = sum(count[s] * (1 - p[s] ** (k[s] + 1)) / (1 - p[s]) for s in count)
            goodput = emitted / (a + sum(count[s] * (b + price[s] * k[s]) for s in count))
            previous, k = k, {s: _length(p[s], price[s] * goodput) for s in count}
            if k == previous:
                break
        own = {s: self.acceptance("diverged" if s == "silent" else s) for s in count}
        return Plan({s: _length(min(own[s], 0.9999), b * goodput) for s in count}, handed, goodput)

    def chain(self, rows: int, plan: Plan) -> Chain:
        """The stop rule of a chain draft of at most `rows` rows; it may let none of them draft."""
        chain = Chain(self, plan.goodput, rows, self.window)
        if chain.going or not rows:
            self._idle_model = 0
            return chain
        self._idle_model += 1
        if self._idle_model < _PROBE_EVERY:
            return chain
        self._idle_model = 0
        return Chain(self, 0.0, rows, _PROBE_TOKENS, _PROBE_ROWS)


class Chain:
    """Stops each row of a chain draft where one more token would not pay, and the chain where one more pass would not.

    A row's token is carried while the chance that all its tokens stand exceeds what verifying it costs. Another pass of
    the model over the rows that go on must promise more tokens than its seconds are worth.

    Args:
        budget: estimates and costs.
        goodput: tokens per second, what a second is worth; 0 finds everything worth it.
        rows: rows that want a draft; the first `of` of them may draft.
        most: tokens of the longest draft, 0 without limit.
    """

    def __init__(self, budget: Budget, goodput: float, rows: int, most: int = 0, of: int | None = None):
        self._budget, self._goodput, self._left = budget, goodput, most or 1 << 30
        self._verify = budget.cost()[1]
        self._fixed, self._token = budget.drafter.fit()
        self._stands = [1.0] * rows
        self.logprobs: list[list[float]] = [[] for _ in range(rows)]
        self.going = self._worth(list(range(rows))[:of])
        """Rows that draft one more token."""

    def step(self, logprobs: Sequence[float], room: Sequence[int]) -> list[int]:
        """The rows `going` drafted one token each with `logprobs`; NaN ends a row. Returns the rows that carry theirs.

        Args: room: how many more tokens each row of the batch may carry.
        """
        carried, promise = [], 0.0
        for row, logprob in zip(self.going, logprobs, strict=True):
            p = self._budget.confidence(logprob) if logprob == logprob else 0.0
            self._stands[row] *= p
            if logprob == logprob and self._stands[row] >= self._goodput * self._verify:
                carried.append(row)
                self.logprobs[row].append(logprob)
                promise += p
        self._budget.observe_promise(promise, len(self.going))
        self._left -= 1
        self.going = self._worth([row for row in carried if room[row] > len(self.logprobs[row])] if self._left else [])
        return carried

    def _worth(self, rows: list[int]) -> list[int]:
        promise, token = self._budget.model_yield(), self._goodput * (self._token + self._verify)
        rows = [row for row in rows if self._stands[row] * promise >= token]
        gain = promise * sum(self._stands[row] for row in rows) - token * len(rows)
        return rows if gain >= self._goodput * self._fixed else []


def _length(p: float, worth: float) -> int:
    """Tokens k of a draft while p^k >= worth."""
    return int(math.log(worth) / math.log(p)) if 0 < worth < 1 and p > 0 else 0


def _level(logprob: float) -> int:
    doubt = -math.expm1(min(logprob, 0.0))
    return min(int(-math.log2(doubt)), _LEVELS - 1) if doubt > 0 else _LEVELS - 1
