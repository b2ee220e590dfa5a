"""A policy with its critic."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from specrl.trainers.config import TrainerConfig

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftConfig
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedModel


class Outputs(NamedTuple):
    """Outputs for each response token [B, T]."""

    logp: Tensor
    """Log-prob at the sampling temperature."""
    entropy: Tensor
    """Of the distribution that the token is sampled from, in nats."""
    values: Tensor | None
    """The critic's value before the token; None without a critic."""


class ActorCritic(nn.Module):
    """Policy and critic as one module, so that the gradients of both are reduced together.

    Args:
        policy: a causal LM, or a peft model around one.
        temperature: of sampling.
        has_critic: whether there is a value head.
        trunk: the critic's own transformer; None puts the value head on the policy's.
        entropy_gradient: whether gradients flow through the entropy, which costs memory.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        *,
        temperature: float,
        has_critic: bool = False,
        trunk: nn.Module | None = None,
        entropy_gradient: bool = False,
    ):
        super().__init__()
        self.policy = policy
        self.trunk = trunk
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient
        self.value: nn.Linear | None = None
        if has_critic:
            width = policy.config.get_text_config().hidden_size
            # The head and its input are float32 in every precision.
            self.value = nn.Linear(width, 1, device=next(policy.parameters()).device)
            nn.init.zeros_(self.value.weight)  # the first values are 0 and send no gradient to the trunk
            nn.init.zeros_(self.value.bias)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name, each once."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def forward(self, ids: Tensor, attention: Tensor, length: int) -> Outputs:
        """Scores the last `length` tokens of each row.

        Args:
            ids: prompt and response [B, P + T], prompts padded on the left, responses on the right.
            attention: 1 for tokens, 0 for padding [B, P + T].
            length: T.
        """
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        inputs = {"input_ids": ids, "attention_mask": attention, "position_ids": positions, "use_cache": False}
        last_hidden: list[Tensor] = []
        lm_head = self.policy.get_output_embeddings()
        with lm_head.register_forward_pre_hook(lambda _, args: last_hidden.append(args[0])):
            logits = self.policy(**inputs, logits_to_keep=length + 1).logits[:, :-1].float() / self.temperature
        logprobs = logits.log_softmax(-1)
        logp = logprobs.gather(-1, ids[:, -length:, None])[..., 0]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_gradient):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        if self.value is None:
            return Outputs(logp, entropy, None)
        hidden = last_hidden[0] if self.trunk is None else self.trunk(**inputs).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):  # autocast would compute in bf16
            states = hidden[:, -length - 1 : -1].float()
            values = self.value(states.flatten(0, 1)).view(len(ids), length)
        return Outputs(logp, entropy, values)


class Models(NamedTuple):
    """The model that PPO trains, and the reference of its KL penalty."""

    trained: ActorCritic
    reference: ActorCritic | None
    """The initial policy, within `reference_context()`; None without a penalty."""
    reference_context: Callable[[], AbstractContextManager] = nullcontext

    def parameter_groups(self, options: TrainerConfig) -> list[dict]:
        """The optimiser's parameter groups: the policy, then the critic if there is one."""
        policy = [p for p in self.trained.policy.parameters() if p.requires_grad]
        groups = [{"params": policy, "lr": options.learning_rate}]
        if self.trained.value is not None:
            critic = [p for name, p in self.trained.named_parameters() if not name.startswith("policy.")]
            groups.append({"params": critic, "lr": options.critic.learning_rate})
        return groups


def build_models(model: PreTrainedModel, options: TrainerConfig, temperature: float, peft: PeftConfig | None) -> Models:
    """Policy with critic, and reference, of a loaded policy. Args: peft: adapters; None trains all weights."""
    has_critic = options.advantage == "gae"
    trunk: Any = None  # transformers types base_model as a plain Module
    if has_critic and options.critic.model == "separate":
        trunk = copy.deepcopy(model.base_model)
    if trunk is not None and options.precision == "bf16":
        trunk.float()  # all of it is trained, also where adapters leave the policy's weights in bf16
    reference = None
    reference_context: Callable[[], AbstractContextManager] = nullcontext
    if options.beta and not peft:
        reference = ActorCritic(copy.deepcopy(model), temperature=temperature).requires_grad_(False).eval()
    if peft:
        from peft import get_peft_model

        adapted: Any = get_peft_model(model, peft)  # forwards every attribute of the model
        model = adapted
        if options.beta:
            reference = ActorCritic(model, temperature=temperature)
            reference_context = adapted.disable_adapter
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if trunk is not None:
            trunk.gradient_checkpointing_enable({"use_reentrant": False})
    trained = ActorCritic(
        model,
        temperature=temperature,
        has_critic=has_critic,
        trunk=trunk,
        entropy_gradient=options.entropy_bonus > 0,
    )
    return Models(trained, reference, reference_context)


def shard(models: Models, accelerator: Accelerator) -> list[FSDPModule]:
    """Shards policy, critic and reference over all processes by FSDP 2; returns the roots of what is trained.

    Each is a root of its own, because the policy is also called alone, and because accelerate's mixed precision would
    round what a common root returns. The value head is sharded in float32 whatever the precision.
    """
    from accelerate.utils import fsdp2_prepare_model
    from torch.distributed.fsdp import fully_shard

    trained, reference, _ = models
    learners = [model for model in (trained.policy, trained.trunk) if model is not None]
    roots = [fsdp2_prepare_model(accelerator, model) for model in learners]
    if reference is not None and reference.policy is not trained.policy:
        fsdp2_prepare_model(accelerator, reference.policy)
    if trained.value is not None:
        roots.append(fully_shard(trained.value))
    return roots
