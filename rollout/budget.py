"""How many draft tokens each row carries in the next pass: as many as pay for themselves, none if drafting loses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

State = Literal["start", "agreeing", "diverged"]
"""What is known of a row's draft: nothing yet, fully accepted in the last pass, or rejected in the last pass."""

_PRIOR = (9.0, 1.0)  # accepted and rejected draft tokens assumed before any were seen: optimistic, soon outweighed
_FORGET_PASS = 0.98
_FORGET_ROLLOUT = 0.5
_PROBE_EVERY, _PROBE_TOKENS = 32, 2


class Budget:
    """Goodput controller: maximises expected tokens per second of a pass (SmartSpec, arXiv 2406.14066).

    A pass with n tokens costs a + b * n seconds, fitted to measured passes with forgetting. A draft of k tokens whose
    tokens are each accepted with probability p emits 1 + p + ... + p^k tokens in expectation, p estimated per state.
    Maximising sum_i emitted_i / (a + b * sum_i (1 + k_i)) gives the rule "draft the j-th token of a row while
    p^j >= b * goodput", solved by fixed-point iteration (Dinkelbach).

    Args: window: draft tokens per row and pass; 0 decides by goodput.
    """

    def __init__(self, window: int = 0):
        self.window = window
        self._seen: dict[str, list[float]] = {state: [0.0, 0.0] for state in ("start", "agreeing", "diverged")}
        self._fixed = [
            0.0
        ] * 5  # calibration: weight, sum n, sum s, sum n^2, sum n*s over passes of n tokens, s seconds
        self._moving = [0.0] * 5  # the same over recent passes
        self._idle = 0

    def acceptance(self, state: State) -> float:
        """Estimated probability that one more draft token of a row in `state` is accepted."""
        accepted, rejected = (seen + prior for seen, prior in zip(self._seen[state], _PRIOR, strict=True))
        return accepted / (accepted + rejected)

    def cost(self) -> tuple[float, float]:
        """Seconds per pass and per token (a, b): least squares, both kept positive."""
        weight, n, s, nn, ns = (fixed + moving for fixed, moving in zip(self._fixed, self._moving, strict=True))
        if not weight:
            return 1.0, 1e-3
        spread = nn - n * n / weight
        b = max((ns - n * s / weight) / spread, 0.0) if spread > 0 else 0.0
        b = min(b, s / n) if b else 0.1 * s / n
        return max((s - b * n) / weight, 0.01 * s / weight), b

    def observe_pass(self, tokens: int, seconds: float) -> None:
        """One forward pass of `tokens` tokens took `seconds`, drawing included."""
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._moving = [_FORGET_PASS * old + x for old, x in zip(self._moving, new, strict=True)]

    def calibrate(self, passes: Sequence[tuple[int, float]]) -> None:
        """Measured (tokens, seconds) that never fade: equal passes alone could not tell a from b."""
        for n, s in passes:
            self._fixed = [old + x for old, x in zip(self._fixed, (1.0, n, s, n * n, n * s), strict=True)]

    def observe_draft(self, state: State, drafted: int, accepted: int) -> None:
        """A row in `state` carried `drafted` tokens, the first `accepted` of which stood."""
        self._seen[state][0] += accepted
        self._seen[state][1] += accepted < drafted

    def next_rollout(self) -> None:
        """Weights have changed: trust the past half as much, so that a bad spell is probed again."""
        self._seen = {state: [_FORGET_ROLLOUT * x for x in seen] for state, seen in self._seen.items()}

    def windows(self, states: Sequence[State]) -> list[int]:
        """Draft tokens for each active row in the next pass. A probe now and then keeps a bad spell from lasting."""
        if self.window:
            return [self.window] * len(states)
        a, b = self.cost()
        p = {state: min(self.acceptance(state), 0.9999) for state in set(states)}
        count = {state: sum(s == state for s in states) for state in p}
        k = dict.fromkeys(p, 0)
        for _ in range(8):
            emitted = sum(count[s] * (1 - p[s] ** (k[s] + 1)) / (1 - p[s]) for s in p)
            goodput = emitted / (a + b * sum(count[s] * (1 + k[s]) for s in p))
            worth = min(b * goodput, 1.0)
            previous, k = k, {s: int(math.log(worth) / math.log(p[s])) if worth < 1 else 0 for s in p}
            if k == previous:
                break
        self._idle = 0 if any(k.values()) else self._idle + 1
        if self._idle == _PROBE_EVERY:
            self._idle = 0
            return [_PROBE_TOKENS] * len(states)
        return [k[s] for s in states]
