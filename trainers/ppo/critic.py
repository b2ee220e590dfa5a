"""A critic for PPO: the value of each response token, from the pass that computes the policy's log-probs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from trl.trainer.utils import FusedCausalLMOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "critic"
"""The critic's name as a part of the policy, and the prefix of its weights."""


@dataclass
class ValuedOutput(FusedCausalLMOutput):
    """What a policy with a critic returns for TRL's loss."""

    value: Tensor | None = None
    """The critic's value before each next token [B, L - 1], float32."""


class Critic(nn.Module):
    """A value head on the last hidden states of a policy, or of a transformer that begins as a copy of it.

    The head is float32 in every precision. It begins with zeros, so that the first values are 0 and send no gradient
    to the layers below.

    Args:
        policy: a causal LM, without adapters.
        separate: whether the critic has a transformer of its own.
    """

    def __init__(self, policy: PreTrainedModel, separate: bool):
        super().__init__()
        self.trunk: Any = copy.deepcopy(policy.base_model) if separate else None
        width = policy.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, device=next(policy.parameters()).device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, states: Tensor) -> Tensor:
        """The value before each next token [B, L - 1], float32. Args: states: last hidden states [B, L, H]."""
        with torch.autocast(states.device.type, enabled=False):
            # FSDP 2 with bf16 casts the weight to bf16 for the pass
            return self.head(states[:, :-1].to(self.head.weight.dtype))[..., 0].float()

    def attach(self, policy: PreTrainedModel) -> None:
        """Makes the critic a part of a policy, whose passes with `fused_lm_head=True` then return a ValuedOutput.

        So it is in the passes that DDP and FSDP 2 wrap. `save_pretrained` leaves it out.

        Args: policy: the causal LM within a peft model or without one, after TRL's `add_fused_lm_head`.
        """
        policy.add_module(NAME, self)
        ignored = (f"{NAME}.{name}" for name in self.state_dict())
        policy._keys_to_ignore_on_save = {*(policy._keys_to_ignore_on_save or ()), *ignored}
        forward = policy.forward

        @functools.wraps(type(policy).forward)
        def with_values(_: Any, *args: Any, fused_lm_head: bool = False, **inputs: Any) -> Any:
            if not fused_lm_head:
                return forward(*args, **inputs)
            states: list[Tensor] = []
            with policy.base_model.register_forward_hook(lambda *call: states.append(call[-1].last_hidden_state)):
                output = forward(*args, fused_lm_head=True, **inputs)
            if self.trunk is not None:
                given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
                states = [self.trunk(**given, use_cache=False).last_hidden_state]
            return ValuedOutput(**output, value=self(states[0]))

        policy.forward = MethodType(with_values, policy)


def recorded(model: Callable[..., Any], outputs: list[Any]) -> Callable[..., Any]:
    """A model whose outputs are also appended to `outputs`, for TRL's methods, which return only log-probs."""

    def call(**inputs: Any) -> Any:
        outputs.append(model(**inputs))
        return outputs[-1]

    return call
