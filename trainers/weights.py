"""Sends the policy's weights to an engine, and checks that the engine reproduces the policy's log-probs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor

from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import DRAFTER, Engine, Meta, Probe, evaluation
from specrl.rollout.types import RolloutError

PROBE_TOKENS = 64
FLOAT32_TOLERANCE = 1e-3
"""Largest log-prob difference, in nats, that float32 rounding explains between two implementations of a model."""
LAYER_ROUNDING = {torch.bfloat16: 0.05, torch.float16: 0.02}
"""Mean difference, in nats, that rounding in a coarser type explains within the layers, before logits are rounded."""
OUTLIERS = 1 / 16
"""Share of tokens that may differ by much more than the mean, as rounding can change a single log-prob a lot."""
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Parts that torch.compile and activation checkpointing insert into the names of weights."""


class AdaptedLayer(Protocol):
    """A layer with LoRA adapters, as built by peft."""

    active_adapters: list[str]

    def get_delta_weight(self, adapter: str) -> Tensor:
        """The difference that the adapter adds to the layer's weight."""


def send(
    engine: Engine,
    policy: torch.nn.Module,
    version: int,
    tokens: Sequence[int],
    dtype: torch.dtype | None = None,
    drafter: torch.nn.Module | None = None,
) -> None:
    """Brings the engine to the policy's weights, which it checks by the log-probs of `tokens`.

    An engine that shares the policy's weights only gets the new version number. Every process of a sharded policy must
    call this, because gathering is collective.

    Args:
        dtype: dtype of the engine's weights, None for that of the policy.
        drafter: a draft model in training, for an engine that drafts with a copy of it.
    """
    if engine.own_weights:
        engine.update_weights(PolicyWeights(policy, dtype, drafter), version, probe(policy, tokens, dtype))
    else:
        engine.update_weights(None, version)


def exact_bits(dtype: torch.dtype, device: torch.device, config: RolloutConfig) -> bool:
    """Whether equal forward passes give equal bits, and equal bits equal tokens: fp32 on a CPU, all tokens kept.

    With top_p or top_k, rounding can change which tokens are kept.
    """
    return dtype == torch.float32 and device.type == "cpu" and (config.top_p, config.top_k) == (1.0, 0)


def check_shared(own_weights: bool, accelerator: Accelerator) -> None:
    """Raises RolloutError if the model is sharded over processes and the engine cannot get all of it.

    An engine that shares the model would gather the shards in each forward pass. Gathering is collective, and the
    number of passes differs between processes, so they would deadlock. FSDP 2 shards are gathered once per update
    instead, for an engine with `own_weights`.
    """
    state = accelerator.state
    if accelerator.distributed_type == DistributedType.FSDP:
        plugin = getattr(state, "fsdp_plugin", None)
        version = getattr(plugin, "fsdp_version", 1)
        if plugin is not None and version == 2 and own_weights:
            if "FULL_STATE_DICT" in str(plugin.state_dict_type):
                return
            raise RolloutError(
                "FSDP saves no model but parts of one with fsdp_state_dict_type: SHARDED_STATE_DICT. Set it to "
                "FULL_STATE_DICT in accelerate's configuration"
            )
        name = f"FSDP {version}"
    elif accelerator.distributed_type == DistributedType.DEEPSPEED and state.deepspeed_plugin.zero_stage == 3:
        name = "DeepSpeed ZeRO-3"
    else:
        return
    raise RolloutError(
        f"{name} leaves no process a whole model, which rollouts need. Launch with torchrun or with ZeRO-2; or with "
        "FSDP, fsdp_version: 2, fsdp_state_dict_type: FULL_STATE_DICT, and weights of the rollouts' own, by "
        "trainer.precision=bf16 without lora.rank or by cluster.num_workers"
    )


class PolicyWeights:
    """A policy's weights under their Hugging Face names: LoRA merged, FSDP2 shards gathered, tied weights once.

    It implements rollout.engines.base.Source. Iterating over it gathers, merges and casts one tensor at a time.

    Args:
        dtype: the engine's dtype; None keeps the dtype of each weight.
        drafter: a draft model, whose weights follow under names with the prefix DRAFTER.

    Raises:
        RolloutError: an adapter cannot be merged.
    """

    def __init__(
        self, policy: torch.nn.Module, dtype: torch.dtype | None = None, drafter: torch.nn.Module | None = None
    ):
        self._models = {"": policy} if drafter is None else {"": policy, DRAFTER: drafter}
        self._dtype = dtype
        self.collective = any(hasattr(p, "full_tensor") for p in policy.parameters())

    def metadata(self) -> list[Meta]:
        """Names, dtypes and unsharded shapes, in the order of iteration."""
        return [Meta(name, self._dtype or part.dtype, tuple(part.shape)) for name, part, _ in self._parts()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, part, layer in self._parts():
            weight = part
            if layer is not None:
                weight = part + sum(layer.get_delta_weight(adapter).detach() for adapter in layer.active_adapters)
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            yield name, weight.to(self._dtype or part.dtype)

    def _parts(self) -> Iterator[tuple[str, Tensor, AdaptedLayer | None]]:
        """Yields (name, this process's weight or shard, the layer whose adapters must be merged into it)."""
        for prefix, model in self._models.items():
            get_base_model = getattr(model, "get_base_model", None)  # of a peft model
            base = get_base_model() if get_base_model else model
            modules: dict[str, Any] = dict(base.named_modules())  # torch gives attributes of modules no types
            for name, weight in base.named_parameters():
                owner, _, leaf = name.rpartition(".")
                parent, _, role = owner.rpartition(".")
                if any(part.startswith(("lora_", "modules_to_save", "critic")) for part in name.split(".")):
                    continue
                layer = None
                if role == "base_layer":
                    layer = modules[parent]
                    name = f"{parent}.{leaf}"
                    if getattr(layer, "use_dora", None) and any(layer.use_dora.values()):
                        raise RolloutError(
                            "DoRA adapters cannot be sent merged to an engine. Use LoRA without use_dora"
                        )
                name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
                yield prefix + name, weight.detach(), layer if leaf == "weight" else None


def check(engine: Engine, policy: torch.nn.Module, version: int, tokens: Sequence[int]) -> None:
    """Raises RolloutError if an engine that shares the policy computes other log-probs of `tokens` than the policy.

    The engine was compared with the policy when it was built, but the policy may have been changed since. An engine
    that holds a copy is checked whenever weights are sent.
    """
    if not engine.own_weights:
        expected = probe(policy, tokens)
        expected.check(engine.score(expected.tokens), version)


@torch.no_grad()
def probe(policy: torch.nn.Module, tokens: Sequence[int], dtype: torch.dtype | None = None) -> Probe:
    """The policy's log-probs of the first PROBE_TOKENS of a text (at least two tokens), and the engine's tolerance.

    In float32 every token must agree. In coarser types the logits are rounded, in bfloat16 to multiples of 0.125 if the
    largest is in [16, 32), so single tokens may differ by two such steps. The mean differs by at most about half a
    step, plus the rounding within the layers. An error of 2 % in the output layer is detected at unlikely tokens, whose
    logits are far below the largest. An error of 2 % in a matrix of a hidden layer changes log-probs no more than
    bfloat16 rounding does, and is detected in float32 only.

    Args:
        dtype: the engine's dtype, None for that of the policy. The coarser of the two determines the tolerance.
    """
    ids = torch.tensor([list(tokens)[:PROBE_TOKENS]], device=next(policy.parameters()).device)
    with evaluation(policy):
        logits = policy(input_ids=ids).logits[0, :-1].float()
    logp = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    text = tuple(ids[0].tolist()), tuple(logp.tolist())
    policy_dtype = next(policy.parameters()).dtype
    coarser = max(policy_dtype, dtype or policy_dtype, key=lambda each: torch.finfo(each).eps)
    if coarser not in LAYER_ROUNDING:
        return Probe(*text, FLOAT32_TOLERANCE)
    exponent = torch.frexp(logits.abs().amax(-1)).exponent  # the largest logit is in [2^(exponent - 1), 2^exponent)
    step = torch.finfo(coarser).eps * torch.exp2(exponent - 1.0).mean().item()
    factor = 1 if coarser == policy_dtype else 2  # autocast accumulates some sums in float32; a coarse copy does not
    return Probe(*text, factor * LAYER_ROUNDING[coarser] + 0.6 * step, OUTLIERS)
