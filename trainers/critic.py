"""A policy with its critic, and what is known of prompts."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Outputs(NamedTuple):
    """What an update needs to know of each response token [B, T]."""

    logp: Tensor
    """Log-prob at the sampling temperature."""
    entropy: Tensor
    """Of the law the token was drawn from, in nats."""
    values: Tensor | None
    """The critic's value before the token; None without a critic."""


class ActorCritic(nn.Module):
    """Policy and critic as one module, so that gradients of both are reduced together.

    Args:
        policy: a causal LM, or a peft model around one.
        trunk: the critic's own transformer (see `trunk_of`); None puts the value head on the policy's.
        valued: whether there is a critic at all.
        temperature: of the sampling law.
        entropic: whether gradients flow through the entropy, which costs memory.
    """

    def __init__(self, policy: nn.Module, *, trunk: nn.Module | None, valued: bool, temperature: float, entropic: bool):
        super().__init__()
        self.policy, self.trunk, self.temperature, self.entropic = policy, trunk, temperature, entropic
        width, device = policy.config.get_text_config().hidden_size, next(policy.parameters()).device
        self.value = nn.Linear(width, 1, device=device) if valued else None  # float32 in every precision
        if self.value is not None:
            nn.init.zeros_(self.value.weight)  # the first values are 0 and teach the trunk nothing
            nn.init.zeros_(self.value.bias)

    def forward(self, ids: Tensor, attention: Tensor, length: int) -> Outputs:
        """Scores the last `length` tokens of each row.

        Args:
            ids: prompt and response [B, P + T], prompts padded on the left, responses on the right.
            attention: 1 for tokens, 0 for padding [B, P + T].
            length: T.
        """
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        inputs = {"input_ids": ids, "attention_mask": attention, "position_ids": positions, "use_cache": False}
        seen: list[Tensor] = []
        with self.policy.get_output_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0])):
            logits = self.policy(**inputs, logits_to_keep=length + 1).logits[:, :-1].float() / self.temperature
        law = logits.log_softmax(-1)
        logp = law.gather(-1, ids[:, -length:, None])[..., 0]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropic):
            entropy = -(law.exp() * law).sum(-1)
        if self.value is None:
            return Outputs(logp, entropy, None)
        hidden = seen[0] if self.trunk is None else self.trunk(**inputs).last_hidden_state
        return Outputs(logp, entropy, self.value(hidden[:, -length - 1 : -1].float())[..., 0])


class PromptValues:
    """What responses to each prompt were worth at its last visits: the value of a prompt before its first token.

    A critic learns what is left to be said: how a response has gone so far, and prompts that were never seen. The same
    idea takes a critic's place in Single-stream Policy Optimization (Xu and Ding 2025, arXiv 2509.13232). A prompt's
    value is of its earlier visits only, so as a baseline it leaves the policy gradient unbiased.
    """

    CERTAINTY = 2
    """Responses that what was believed before weighs as much as."""

    def __init__(self, values: dict[str, float] | None = None):
        self._values = dict(values or {})

    def of(self, prompts: Sequence[str]) -> list[float]:
        """The value of each prompt; of unknown ones the mean of all, 0 before there are any."""
        usual = self._usual()
        return [self._values.get(prompt, usual) for prompt in prompts]

    def learn(self, returns: Iterable[tuple[str, float]]) -> None:
        """Takes in a visit: (prompt, return) of each response. A prompt moves towards its mean by n / (n + 2)."""
        usual, found = self._usual(), defaultdict(list)
        for prompt, value in returns:
            found[prompt].append(value)
        for prompt, values in found.items():
            n, before = len(values), self._values.get(prompt, usual)
            self._values[prompt] = (self.CERTAINTY * before + sum(values)) / (self.CERTAINTY + n)

    def _usual(self) -> float:
        return sum(self._values.values()) / len(self._values) if self._values else 0.0

    def state(self) -> dict[str, float]:
        """What `PromptValues` takes to go on, as JSON types."""
        return dict(self._values)


def trunk_of(policy: PreTrainedModel) -> nn.Module:
    """A copy of a causal LM without its output layer: a critic's transformer before its training."""
    return copy.deepcopy(policy.base_model)
