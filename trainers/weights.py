"""Weights on their way from the trainer to an engine that holds its own copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor

from specrl.rollout.engines.base import DRAFTER, Engine, Probe, evaluation
from specrl.rollout.engines.transfer import Meta
from specrl.rollout.types import RolloutError

PROBE_TOKENS = 64
STRICT = 1e-3
"""Largest log-prob difference, in nats, that rounding in float32 explains between two implementations of a model."""
INSIDE = {torch.bfloat16: 0.05, torch.float16: 0.02}
"""Mean difference, in nats, that the coarser types' rounding inside a model explains, before its logits are rounded."""
OUTLIERS = 1 / 16
"""Share of tokens that may differ by much more than the mean may, where single tokens are at the mercy of rounding."""
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch.compile and activation checkpointing put into the names of the weights that they wrap."""


@runtime_checkable
class Adapted(Protocol):
    """A model with adapters, as peft makes it."""

    def get_base_model(self) -> torch.nn.Module:
        """The model that the adapters are in."""


class AdaptedLayer(Protocol):
    """A layer with LoRA adapters, as peft makes it."""

    active_adapters: list[str]

    def get_delta_weight(self, adapter: str) -> Tensor:
        """What the adapter adds to the layer's weight."""


def send(
    engine: Engine,
    policy: torch.nn.Module,
    version: int,
    tokens: Sequence[int],
    dtype: torch.dtype | None = None,
    drafter: torch.nn.Module | None = None,
) -> None:
    """Brings the engine to the policy's weights, proven by the log-probs of `tokens`; a shared model is only versioned.

    Every process of a sharded policy must call it: gathering is collective.

    Args:
        dtype: of the engine's weights, None where it is the policy's.
        drafter: a draft model that is trained here, for an engine that drafts with a copy of it.
    """
    if engine.own_weights:
        weights = PolicyWeights(policy, dtype)
        given = weights if drafter is None else Together(weights, PolicyWeights(drafter, dtype))
        engine.update_weights(given, version, probe(policy, tokens, dtype))
    else:
        engine.update_weights(None, version)


def check_shared(own_weights: bool, accelerator: Accelerator) -> None:
    """Raises RolloutError where each process holds a part of the model and the engine cannot have the whole.

    Passes of an engine differ in number from process to process, and gathering the parts for each is collective: the
    processes would wait forever. Parts of FSDP 2 are gathered once an update, for an engine with `own_weights`.
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
    """A policy's weights under their Hugging Face names: LoRA merged, FSDP2 shards gathered, a tied weight once.

    A rollout.engines.transfer.Source: walking it is what gathers, merges and casts, one tensor at a time.

    Args: dtype: what the engine holds; None: each weight's own.

    Raises:
        RolloutError: no process can have the whole of a weight, or an adapter cannot be merged.
    """

    def __init__(self, policy: torch.nn.Module, dtype: torch.dtype | None = None):
        if type(policy).__name__ == "FullyShardedDataParallel" or any(hasattr(p, "ds_id") for p in policy.parameters()):
            raise RolloutError(
                "weights sharded by FSDP version 1 or DeepSpeed ZeRO-3 cannot be sent to an engine. Use FSDP with "
                "fsdp_version: 2 in accelerate's configuration, or ZeRO-2"
            )
        self._base = policy.get_base_model() if isinstance(policy, Adapted) else policy
        self._dtype = dtype
        self.collective = any(hasattr(p, "full_tensor") for p in policy.parameters())

    def metadata(self) -> list[Meta]:
        """Names, types and whole shapes, in the order of the walk."""
        return [Meta(name, self._dtype or part.dtype, tuple(part.shape)) for name, part, _ in self._parts()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, part, layer in self._parts():
            weight = part
            if layer is not None:
                weight = part + sum(layer.get_delta_weight(adapter).detach() for adapter in layer.active_adapters)
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            yield name, weight.to(self._dtype or part.dtype)

    def _parts(self) -> Iterator[tuple[str, Tensor, AdaptedLayer | None]]:
        """(name, weight as it lies here, the layer whose adapters it needs)."""
        modules: dict[str, Any] = dict(self._base.named_modules())  # torch types no attribute of another's module
        for name, weight in self._base.named_parameters():
            owner, _, leaf = name.rpartition(".")
            parent, _, role = owner.rpartition(".")
            if any(part.startswith(("lora_", "modules_to_save")) for part in name.split(".")):
                continue
            layer = None
            if role == "base_layer":
                layer, name = modules[parent], f"{parent}.{leaf}"
                if getattr(layer, "use_dora", None) and any(layer.use_dora.values()):
                    raise RolloutError("DoRA adapters cannot be sent merged to an engine. Use LoRA without use_dora")
            name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
            yield name, weight.detach(), layer if leaf == "weight" else None


class Together:
    """A policy's weights, then those of the draft model that is trained beside it, by names of their own.

    A rollout.engines.transfer.Source, if both are walked as one.
    """

    def __init__(self, policy: PolicyWeights, drafter: PolicyWeights):
        self._policy, self._drafter, self.collective = policy, drafter, policy.collective

    def metadata(self) -> list[Meta]:
        """See Source."""
        return [
            *self._policy.metadata(),
            *(meta._replace(name=DRAFTER + meta.name) for meta in self._drafter.metadata()),
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._policy
        yield from ((DRAFTER + name, tensor) for name, tensor in self._drafter)


def check(engine: Engine, policy: torch.nn.Module, version: int, tokens: Sequence[int]) -> None:
    """Raises RolloutError when an engine that shares the policy gives `tokens` other log-probs than the policy does.

    Its path was compared with the policy's when it was built; the policy may have been changed since. An engine that
    holds its own copy is checked whenever weights are sent.
    """
    if not engine.own_weights:
        expected = probe(policy, tokens)
        expected.check(engine.score(expected.tokens), version)


@torch.no_grad()
def probe(policy: torch.nn.Module, tokens: Sequence[int], dtype: torch.dtype | None = None) -> Probe:
    """What the trainer's policy gives the first PROBE_TOKENS of a text (at least two tokens).

    In float32 every token must agree. In coarser types the logits themselves are rounded: to steps of 0.125 in bfloat16
    where the largest lies in [16, 32), so that single tokens may well differ by two steps. The mean of all differs by
    about half a step at most, and by what the model's inside adds. An output
    layer that is 2 % wrong shows at unlikely tokens, whose logits lie far below the largest. A matrix inside that is
    2 % wrong moves log-probs no more than bfloat16's rounding does: only float32 shows it.

    Args: dtype: the engine's; the coarser of the two decides what rounding explains. None: the policy's own.
    """
    ids = torch.tensor([list(tokens)[:PROBE_TOKENS]], device=next(policy.parameters()).device)
    with evaluation(policy):
        logits = policy(input_ids=ids).logits[0, :-1].float()
    logp = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    text, own = (tuple(ids[0].tolist()), tuple(logp.tolist())), next(policy.parameters()).dtype
    coarser = max(own, dtype or own, key=lambda kind: torch.finfo(kind).eps)
    if coarser not in INSIDE:
        return Probe(*text, STRICT)
    exponent = torch.frexp(logits.abs().amax(-1)).exponent  # the largest logit lies in [2^(exponent - 1), 2^exponent)
    step = torch.finfo(coarser).eps * torch.exp2(exponent - 1.0).mean().item()
    apart = 1 if coarser == own else 2  # autocast keeps in float32 what a copy of the weights adds up in its own type
    return Probe(*text, apart * INSIDE[coarser] + 0.6 * step, OUTLIERS)
