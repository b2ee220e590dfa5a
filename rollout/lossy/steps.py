"""Reasoning steps: where one ends, and the records that a router decides on. Nothing here knows a model."""

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
"""Why a step ended: by a separator, by an EOS id, at a cap in tokens, or by logits that are no numbers."""


@dataclass(slots=True)
class Step:
    """Tokens up to and including a separator or an EOS id. All lists have the step's length."""

    source: Source
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each token under the law of its source, after temperature, top-k and top-p."""
    entropies: list[float] = field(default_factory=list)
    """Entropy of that law in nats; empty when no router asks for it."""
    policy_logprobs: list[float] = field(default_factory=list)
    """Log-prob of each token under the policy's law; empty while the policy has not read a draft step."""
    end: End = "cap"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft step that waits for a decision, with everything before it."""

    row: int
    """Place of the request in its batch; scorers that know more of a request look it up by this."""
    prompt: Sequence[int]
    history: Sequence[Step]
    """The steps kept so far."""
    step: Step
    """What the draft would go on with."""
    rival: Step | None = None
    """What the policy would go on with; only for routers that ask for it."""

    @property
    def response(self) -> list[int]:
        """The response up to the candidate."""
        return [token for step in self.history for token in step.tokens]


class StepEnd:
    """Decides whether a step has ended; on text, so that a separator may lie across tokens or inside one.

    Args:
        separators: texts that end a step, such as ["\\n\\n"]; the step keeps them.
        decode: token ids to text.
        eos_ids: ids that end the response.
        max_tokens: cap of a step; a longer one is a runaway.

    Raises:
        RolloutError: no separator, an empty one, or a cap below 1.
    """

    def __init__(
        self,
        separators: Collection[str],
        decode: Callable[[Sequence[int]], str],
        eos_ids: Collection[int],
        max_tokens: int,
    ):
        check(RolloutConfig(routed=RoutedConfig(separators=[*separators], max_step_tokens=max_tokens)))
        self._separators, self._decode, self._eos = tuple(separators), decode, frozenset(eos_ids)
        last = {separator[-1] for separator in separators}
        self._may_close = cache(lambda token: not last.isdisjoint(decode([token])))
        self.max_tokens = max_tokens

    def __call__(self, tokens: Sequence[int]) -> End | None:
        """Why the step `tokens` ends with its last token, None while it goes on; asked after every token."""
        if tokens[-1] in self._eos:
            return "eos"
        if self._may_close(tokens[-1]) and any(separator in self._decode(tokens) for separator in self._separators):
            return "separator"
        return "cap" if len(tokens) >= self.max_tokens else None

    def blank(self, tokens: Sequence[int]) -> bool:
        """True for a step without any text, such as a lone separator; an EOS id is no text."""
        return not self._decode([t for t in tokens if t not in self._eos]).strip()
