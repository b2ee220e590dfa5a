"""What a run will hold in memory, computed before its first step."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrl.run.policy import rollout_dtype, trained_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specrl.config.schema import Config

MB = 2**20
ROLLOUTS = ("vLLM weights", "vLLM KV", "verification logits")
UPDATES = ("training logits", "co-training logits")


@dataclass(frozen=True)
class Plan:
    """Upper bounds of the parts of a run's memory on the policy's device, activations of the update left out."""

    parts: dict[str, float]
    """MB each."""
    held: float = 0.0
    """MB of them that are there once trainer and engine are built."""
    sleeps: bool = False
    """vLLM gives its memory back between rollouts, so that ROLLOUTS and UPDATES need not fit at the same time."""

    @property
    def peak(self) -> dict[str, float]:
        """The parts that are there at the same time, when most is."""
        rollouts, updates = (sum(self.parts.get(name, 0.0) for name in names) for names in (ROLLOUTS, UPDATES))
        elsewhere = (UPDATES if rollouts > updates else ROLLOUTS) if self.sleeps else ()
        return {name: size for name, size in self.parts.items() if name not in elsewhere}


def plan(config: Config, model: PreTrainedModel, prompt_tokens: int) -> Plan:
    """What a run will take, asked when its trainer and engine are built.

    Args:
        model: the policy as it is trained, adapters included.
        prompt_tokens: length of the longest prompt.
    """
    trainer, shape = config.trainer, model.config.get_text_config()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    world = int(os.environ.get("WORLD_SIZE", 1))
    split = world if os.environ.get("ACCELERATE_USE_FSDP") == "true" else 1  # as `accelerate launch` says
    total = trainer.prompts_per_step * config.rollout.group_size // world
    parts = {"policy": weights, "gradients and optimiser": 3 * trained / split}
    if trainer.beta and not config.lora.rank:
        parts["reference"] = weights
    if trainer.algorithm == "ppo" and trainer.advantage == "gae" and trainer.critic.model == "separate":
        parts["critic"] = 4 * weights  # with its gradients and optimiser
    if not config.cluster.num_workers:
        parts |= _rollouts(config, model, total, prompt_tokens)
    per_pass = trainer.rows_per_pass or total
    parts["training logits"] = 2 * 4 * per_pass * config.rollout.max_new_tokens * shape.vocab_size
    if trainer.drafter.train:
        parts["co-training logits"] = 4 * 4 * trainer.drafter.tokens_per_update * shape.vocab_size
    parts = {name: size / MB for name, size in parts.items()}
    sleeps = model.device.type == "cuda" and config.rollout.vllm.sleep and "vLLM KV" in parts
    built = ("policy", "reference", "rollout copy", *(() if sleeps else ("vLLM weights", "vLLM KV")))
    held = sum(parts.get(name, 0.0) for name in built) + parts.get("critic", 0.0) / 4
    return Plan(parts, held, sleeps)


def _rollouts(config: Config, model: PreTrainedModel, total: int, prompt_tokens: int) -> dict[str, float]:
    """Bytes of what rolls out `total` rows in this process."""
    rollout, vllm, shape = config.rollout, config.rollout.vllm, model.config.get_text_config()
    width = 4 if rollout_dtype(config) == "float32" else 2
    drawn = sum(p.numel() for p in model.parameters()) * width  # what responses are drawn with
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    kv = 2 * shape.num_hidden_layers * heads * head * width
    rows = min(total, rollout.rows_per_batch)
    parts = {}
    if rollout.engine == "vllm":
        parts["vLLM weights"] = own = drawn / vllm.tensor_parallel
        if model.device.type == "cuda":  # its share of the device has its weights in it
            free = max(0.0, vllm.memory_utilization * total_mb(model.device) * MB - own)
        else:
            free = 512 * MB
        parts["vLLM KV"] = vllm.kv_cache_mb * MB or free
    else:
        if rollout_dtype(config) != trained_dtype(config):
            parts["rollout copy"] = drawn
        most = rollout.local.kv_cache_mb * MB or math.inf
        parts["rollout KV"] = min(rows * (prompt_tokens + rollout.max_new_tokens) * kv, most)
    parts["verification logits"] = min(rollout.logits_mb * MB, rollout.tokens_per_pass * shape.vocab_size * 16)
    return parts


def sentence(plan: Plan, free_mb: float) -> str:
    """The plan as one line, with advice when it does not fit. Args: free_mb: when trainer and engine are built."""
    peak, before = sum(plan.peak.values()), free_mb + plan.held
    line = "memory plan: " + ", ".join(f"{name} {size:.0f}" for name, size in plan.parts.items() if size >= 0.5)
    at_once = ", rollout or update, as vLLM sleeps in between," if plan.sleeps else ""
    line += f" = {peak:.0f} MB{at_once} of {before:.0f} MB free at the start, activations left out"
    kv = plan.peak.get("rollout KV", 0.0)
    if kv > 2 * (peak - before) > 0:
        line += f". KV gets the {kv - (peak - before):.0f} MB that are left: fewer rows run at a time, the others after"
    elif peak > before:
        worst = max(plan.peak, key=plan.peak.get)
        line += f". It does not fit; the largest part is {worst}: lower {ADVICE[worst]}"
    return line


ADVICE = {
    "policy": "the model's size, or take lora.rank=16 with trainer.precision=bf16",
    "rollout copy": "the model's size, or take lora.rank=16, which needs no copy",
    "gradients and optimiser": "the trained weights with lora.rank=16",
    "reference": "the trained weights with lora.rank=16, or take trainer.beta=0",
    "critic": "its size by trainer.critic.model=head",
    "rollout KV": "rollout.max_new_tokens, as less than half of the rows run at a time",
    "vLLM weights": "the model's size, or give the workers machines of their own with cluster.num_workers",
    "vLLM KV": "rollout.vllm.memory_utilization, or rollout.vllm.kv_cache_mb where it is set or on a CPU",
    "verification logits": "rollout.logits_mb",
    "training logits": "trainer.rows_per_pass",
    "co-training logits": "trainer.drafter.tokens_per_update",
}


def total_mb(device) -> float:
    """Memory in MB of a GPU, whoever holds it."""
    import torch

    return torch.cuda.mem_get_info(device)[1] / MB


def free_mb(device) -> float:
    """Free memory in MB of a torch device; of the machine for a CPU."""
    import psutil
    import torch

    return (torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available) / MB
