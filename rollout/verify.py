"""Acceptance rules: pure functions from what rode (`Draft`) and what was drawn (`Drawn`) to what stands (`Stood`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import eq
from typing import TYPE_CHECKING

from specrl.rollout.drafting.draft import Draft

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class TargetSamples:
    """What one pass says about the tokens that a row fed: lists with one entry per token, for the token after it."""

    at: int
    """Response position of the first draw."""
    draws: list[int]
    logprobs: list[float]
    """Of the draws."""
    text_logprobs: list[float]
    """Of the tokens that follow in the row's text, so of its draft; where none is known the entry means nothing."""
    usable: bool = True
    """False when some logits were NaN or infinite."""
    states: tuple[Tensor, int] | None = None
    """Final hidden states of the whole pass, and where the row's begin."""

    @property
    def hidden(self) -> Tensor:
        """Final hidden states [n, hidden] of the tokens fed."""
        states, first = self.states
        return states[first : first + len(self.draws)]


@dataclass(slots=True)
class Accepted:
    """What a row emits after a pass, before EOS and cap cut it. Sequences of one length."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    """Under the policy."""
    behaviour: Sequence[float]
    """See `Completion.behaviour_logprobs`."""
    drafted: int
    """How many of the tokens, from the first on, are the draft's."""
    behind: Sequence[int] = ()
    """What was drawn after these, behind draft tokens that did not stand: guesses, by the row's own noise."""


AcceptanceRule = Callable[[int, Draft, TargetSamples], Accepted]
"""Decides what stands of a row's draft, given the row's noise key."""


def exact(key: int, draft: Draft, drawn: TargetSamples) -> Accepted:
    """The draws up to the first that differs from the draft, that one included."""
    n = accept_exact(drawn.draws, draft.tokens)
    logprobs = drawn.logprobs[: n + 1]
    behind = drawn.draws[n + 1 :] if n < len(draft.tokens) else ()
    return Accepted(drawn.draws[: n + 1], logprobs, logprobs, n, behind)


def accept_exact(draws: Sequence[int], draft: Sequence[int]) -> int:
    """Accepted draft tokens under the exact rule: a draft token stands when it equals the sampler's own draw.

    `draws[i]` is the keyed draw given the prefix and draft[:i]; it may be longer than the draft. The output
    draws[:n + 1] is what plain decoding with the same key emits, whatever the draft (E0 of docs/guarantees.md).
    """
    if draws[: len(draft)] == draft:  # lists, most often
        return len(draft)
    return [*map(eq, draws, draft), False].index(False)


def cut(tokens: Sequence[int], eos_ids: frozenset[int], room: int) -> tuple[int, str | None]:
    """How many of `tokens` may be emitted, and the finish reason when that ends the response.

    The first EOS ends it (kept, `stop`), else the cap of `room` tokens (`length`); an EOS that is exactly the last
    token allowed is a `stop`.
    """
    if not eos_ids.isdisjoint(tokens):
        end = next(i for i, token in enumerate(tokens) if token in eos_ids)
        if end < room:
            return end + 1, "stop"
    return (room, "length") if len(tokens) >= room else (len(tokens), None)
