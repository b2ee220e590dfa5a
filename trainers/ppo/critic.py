"""A policy with its critic."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from specrl.trainers.config import TrainerConfig

if TYPE_CHECKING:
    from peft import PeftConfig
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
        trunk: the critic's own transformer; None puts the value head on the policy's.
        valued: whether there is a critic at all.
        temperature: of the sampling law.
        entropic: whether gradients flow through the entropy, which costs memory.
    """

    def __init__(self, policy: nn.Module, *, trunk: nn.Module | None, valued: bool, temperature: float, entropic: bool):
        super().__init__()
        self.policy, self.trunk, self.temperature, self.entropic = policy, trunk, temperature, entropic
        width, device = policy.config.get_text_config().hidden_size, next(policy.parameters()).device
        self.value = nn.Linear(width, 1, device=device) if valued else None  # float32 in every precision, its input too
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
        with torch.autocast(hidden.device.type, enabled=False):  # which would compute in bf16 again
            values = self.value(hidden[:, -length - 1 : -1].float())[..., 0]
        return Outputs(logp, entropy, values)


class Models(NamedTuple):
    """What PPO trains, and what its KL penalty is against."""

    trained: ActorCritic
    reference: ActorCritic | None
    """The initial policy, inside `initial()`; None without a penalty."""
    initial: Callable[[], AbstractContextManager] = nullcontext

    def groups(self, options: TrainerConfig) -> list[dict]:
        """The optimiser's parameter groups: the policy, then the critic where there is one."""
        trained, policy = self.trained, self.trained.policy
        groups = [{"params": [p for p in policy.parameters() if p.requires_grad], "lr": options.learning_rate}]
        if trained.value is not None:
            own = [p for name, p in trained.named_parameters() if not name.startswith("policy.")]
            groups.append({"params": own, "lr": options.critic.learning_rate})
        return groups


def models(model: PreTrainedModel, options: TrainerConfig, temperature: float, peft: PeftConfig | None) -> Models:
    """Policy with critic, and reference, of a loaded policy. Args: peft: adapters, None trains all weights."""
    valued = options.advantage == "gae"
    trunk = copy.deepcopy(model.base_model) if valued and options.critic.model == "separate" else None
    if trunk is not None and options.precision == "bf16":
        trunk.float()  # it is trained whole, also where adapters leave the policy's own weights in bf16
    plain = {"trunk": None, "valued": False, "temperature": temperature, "entropic": False}
    reference, initial = None, nullcontext
    if options.beta and not peft:
        reference = ActorCritic(copy.deepcopy(model), **plain).requires_grad_(False).eval()
    if peft:
        from peft import get_peft_model

        model = get_peft_model(model, peft)
        if options.beta:
            reference, initial = ActorCritic(model, **plain), model.disable_adapter
    if options.gradient_checkpointing:
        for each in filter(None, (model, trunk)):
            each.gradient_checkpointing_enable({"use_reentrant": False})
    entropic = options.entropy_bonus > 0
    trained = ActorCritic(model, trunk=trunk, valued=valued, temperature=temperature, entropic=entropic)
    return Models(trained, reference, initial)
