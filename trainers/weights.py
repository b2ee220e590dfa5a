"""Weights on their way from the trainer to an engine that holds its own copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor

from rollout.engines.base import Engine, Probe
from rollout.types import RolloutError

PROBE_TOKENS = 64
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}
"""Largest log-prob difference, in nats, that rounding explains between two implementations of a model."""


def send(engine: Engine, policy: torch.nn.Module, version: int, tokens: Sequence[int]) -> None:
    """Brings the engine to the policy's weights, proven by the log-probs of `tokens`; a shared model is only versioned.

    Every process of a sharded policy must call it: gathering is collective.
    """
    if engine.own_weights:
        engine.update_weights(named_weights(policy), version, probe(policy, tokens))
    else:
        engine.update_weights(None, version)


def check_shared(engine: Engine, accelerator: Accelerator) -> None:
    """Raises RolloutError for an engine that would decode with a model of which each process holds a part.

    Its passes differ in number from process to process, and gathering the parts is collective: they would wait forever.
    """
    kind = accelerator.distributed_type
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    sharded = kind == DistributedType.FSDP or (kind == DistributedType.DEEPSPEED and plugin.zero_stage == 3)
    if sharded and not engine.own_weights:
        raise RolloutError(
            f"{'FSDP' if kind == DistributedType.FSDP else 'DeepSpeed ZeRO-3'} leaves no process a whole model, which "
            "rollout.engine=transformers decodes with. Launch with torchrun or with ZeRO-2, or use FSDP with "
            "fsdp_version: 2 and cluster.num_workers"
        )


def named_weights(policy: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of every weight: LoRA merged, FSDP2 shards gathered, a tied weight once."""
    if type(policy).__name__ == "FullyShardedDataParallel" or hasattr(policy, "ds_id"):
        raise RolloutError(
            "weights sharded by FSDP version 1 or DeepSpeed ZeRO-3 cannot be sent to an engine. Use FSDP with "
            "fsdp_version: 2 in accelerate's configuration, or ZeRO-2"
        )
    base = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    modules = dict(base.named_modules())
    for name, weight in base.named_parameters():
        owner, _, leaf = name.rpartition(".")
        parent, _, role = owner.rpartition(".")
        if any(part.startswith(("lora_", "modules_to_save")) for part in name.split(".")):
            continue
        weight = weight.detach()
        if role == "base_layer":
            layer, name = modules[parent], f"{parent}.{leaf}"
            if getattr(layer, "use_dora", None) and any(layer.use_dora.values()):
                raise RolloutError("DoRA adapters cannot be sent merged to an engine. Use LoRA without use_dora")
            if leaf == "weight":
                weight = weight + sum(layer.get_delta_weight(adapter).detach() for adapter in layer.active_adapters)
        yield name, weight.full_tensor() if hasattr(weight, "full_tensor") else weight


@torch.no_grad()
def probe(policy: torch.nn.Module, tokens: Sequence[int]) -> Probe:
    """What the trainer's policy gives the first PROBE_TOKENS of a text (at least two tokens)."""
    ids = torch.tensor([list(tokens)[:PROBE_TOKENS]], device=next(policy.parameters()).device)
    training = policy.training
    policy.eval()
    logits = policy(input_ids=ids).logits[0].float()
    policy.train(training)
    logp = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    dtype = next(policy.parameters()).dtype
    return Probe(tuple(ids[0].tolist()), tuple(logp.tolist()), TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]))
