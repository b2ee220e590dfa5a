"""The exact acceptance rule, and the records that acceptance rules take and return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import eq
from typing import TYPE_CHECKING, Any

from specrl.rollout.drafting.draft import Draft
from specrl.rollout.types import FinishReason

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class TargetSamples:
    """What the policy samples after each token that one pass verified for a row; lists with one entry per token."""

    position: int
    """Response position of the first sample."""
    tokens: list[int]
    logprobs: list[float]
    """Of the sampled tokens."""
    draft_logprobs: list[float]
    """Of the tokens that follow in the row's text, which is its draft; the last entry means nothing without one."""
    usable: bool = True
    """False when some logits were NaN or infinite."""
    states: tuple[Tensor, int] | None = None
    """Final hidden states of the whole pass, and the index of the row's first."""

    @property
    def hidden(self) -> Tensor:
        """Final hidden states [n, hidden] of the tokens that were verified."""
        assert self.states is not None, "the engine keeps states only for rules that read them"
        states, first = self.states
        return states[first : first + len(self.tokens)]


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
    own: tuple[int, float] | None = None
    """See `Completion.own`."""


AcceptanceRule = Callable[[int, Any, TargetSamples], Accepted]
"""Decides which tokens of a row's draft are accepted, given the row's noise key. The draft is a `Draft`, of the class
that the rule's own drafting makes."""


def exact(key: int, draft: Draft, samples: TargetSamples) -> Accepted:
    """The sampled tokens up to the first that differs from the draft, that one included."""
    n = accept_exact(samples.tokens, draft.tokens)
    logprobs = samples.logprobs[: n + 1]
    return Accepted(samples.tokens[: n + 1], logprobs, logprobs, n)


def accept_exact(sampled: Sequence[int], draft: Sequence[int]) -> int:
    """Accepted draft tokens under the exact rule: those before the first that differs from the policy's own sample.

    `sampled[i]` is sampled with the row's noise given the prefix and draft[:i]; it may be longer than the draft.
    sampled[:n + 1] is what plain decoding with the same key emits, whatever the draft (E0 of docs/guarantees.md).
    """
    if sampled[: len(draft)] == draft:  # lists, most often
        return len(draft)
    return [*map(eq, sampled, draft), False].index(False)


def cut(tokens: Sequence[int], eos_ids: frozenset[int], most: int) -> tuple[int, FinishReason | None]:
    """How many of `tokens` may be emitted, and the finish reason if that ends the response.

    The first EOS ends it (kept, `stop`), else the cap of `most` tokens (`length`); an EOS that is exactly the last
    token allowed is a `stop`.
    """
    end = next((i for i, token in enumerate(tokens) if token in eos_ids), most)
    if end < most:
        return end + 1, "stop"
    return (most, "length") if len(tokens) >= most else (len(tokens), None)
