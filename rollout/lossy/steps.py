"""Reasoning steps: where one ends, and the records that a router decides on. Independent of models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from specrl.rollout.checks import check
from specrl.rollout.config import RolloutConfig
from specrl.rollout.sections import RoutedConfig

Source = Literal["draft", "policy"]
End = Literal["separator", "eos", "cap", "broken"]
"""Why a step ended: by a separator, by an EOS id, at a cap in tokens, or by logits that are NaN or infinite."""


@dataclass(slots=True)
class Step:
    """Tokens up to and including a separator or an EOS id. All lists have the step's length."""

    source: Source
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each token under its source, after temperature, top-k and top-p."""
    entropies: list[float] = field(default_factory=list)
    """Entropy of the source's distribution at each token, in nats; empty when no router needs it."""
    policy_logprobs: list[float] = field(default_factory=list)
    """Log-prob of each token under the policy; empty while the policy has not read a draft step."""
    end: End = "cap"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft step to decide on, with everything before it."""

    row: int
    """Index of the request in its batch, by which scorers find what else they know of the request."""
    prompt: Sequence[int]
    history: Sequence[Step]
    """The steps kept so far."""
    step: Step
    """The draft's continuation."""
    rival: Step | None = None
    """The policy's continuation; only for routers that need it."""

    @property
    def response(self) -> list[int]:
        """The response up to the candidate."""
        return [token for step in self.history for token in step.tokens]


class StepEnd:
    """Decides whether a step has ended, from its text: a separator may span tokens or be part of one.

    Args:
        separators: texts that end a step, such as ["\\n\\n"], and belong to it.
        decode: token ids to text.
        eos_ids: ids that end the response.
        max_tokens: a longer step is cut, and its row goes to the policy.

    Raises:
        RolloutError: no separator, an empty one, or a cap below 1.
    """

    def __init__(
        self,
        separators: Collection[str],
        decode: Callable[[list[int]], str | list[str]],
        eos_ids: Collection[int],
        max_tokens: int,
    ):
        check(RolloutConfig(routed=RoutedConfig(separators=[*separators], max_step_tokens=max_tokens)))
        self._separators = tuple(separators)
        self._decode = decode
        self._eos_ids = frozenset(eos_ids)
        self.max_tokens = max_tokens
        last_characters = {separator[-1] for separator in separators}
        self._may_close = cache(lambda token: not last_characters.isdisjoint(self._text([token])))

    def __call__(self, tokens: Sequence[int]) -> End | None:
        """Why the step `tokens` ends with its last token, None if it continues. It must be called after every token."""
        if tokens[-1] in self._eos_ids:
            return "eos"
        if self._may_close(tokens[-1]) and any(separator in self._text(tokens) for separator in self._separators):
            return "separator"
        return "cap" if len(tokens) >= self.max_tokens else None

    def blank(self, tokens: Sequence[int]) -> bool:
        """True for a step without text, such as a lone separator. EOS ids do not count as text."""
        return not self._text([t for t in tokens if t not in self._eos_ids]).strip()

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._decode([*tokens]))
