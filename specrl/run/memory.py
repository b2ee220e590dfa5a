"""What a run will hold in memory, computed before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrl.run.policy import rollout_dtype, trained_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specrl.config.schema import Config

MB = 2**20


def plan(config: Config, model: PreTrainedModel, prompt_tokens: int) -> dict[str, float]:
    """Upper bounds in MB of the parts of a run's memory on the policy's device, activations of the update left out.

    Args:
        model: the policy as it is trained, adapters included.
        prompt_tokens: length of the longest prompt.
    """
    rollout, vllm = config.rollout, config.rollout.vllm
    shape = model.config.get_text_config()
    width = 4 if rollout_dtype(config) == "float32" else 2
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    drawn = sum(p.numel() for p in model.parameters()) * width  # what responses are drawn with
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    kv = 2 * shape.num_hidden_layers * heads * head * width
    total = config.trainer.prompts_per_step * rollout.group_size
    rows = min(total, rollout.rows_per_batch)
    parts = {"policy": weights, "gradients and optimiser": 3 * trained}
    trainer = config.trainer
    if trainer.beta and not config.lora.rank:
        parts["reference"] = weights
    if trainer.algorithm == "ppo" and trainer.advantage == "gae" and trainer.critic.model == "separate":
        parts["critic"] = 4 * weights  # with its gradients and optimiser
    if not config.cluster.num_workers:
        if rollout.engine == "vllm":
            parts["vLLM weights"] = drawn
            parts["vLLM KV"] = vllm.kv_cache_mb * MB or (512 * MB if model.device.type == "cpu" else 0)
        else:
            if rollout_dtype(config) != trained_dtype(config):
                parts["rollout copy"] = drawn
            parts["rollout KV"] = rows * (prompt_tokens + rollout.max_new_tokens) * kv
        parts["verification logits"] = min(rollout.logits_mb * MB, rollout.tokens_per_pass * shape.vocab_size * 16)
    per_pass = config.trainer.rows_per_pass or total
    parts["training logits"] = 2 * 4 * per_pass * rollout.max_new_tokens * shape.vocab_size
    if config.trainer.drafter.train:
        parts["co-training logits"] = 4 * 4 * config.trainer.drafter.tokens_per_update * shape.vocab_size
    return {name: size / MB for name, size in parts.items()}


def sentence(parts: dict[str, float], free_mb: float) -> str:
    """The plan as one line, with advice when it does not fit."""
    total = sum(parts.values())
    line = "memory plan: " + ", ".join(f"{name} {size:.0f}" for name, size in parts.items() if size >= 0.5)
    line += f" = {total:.0f} MB of {free_mb:.0f} MB free, activations left out"
    if total > free_mb:
        worst = max(parts, key=parts.get)
        line += f". It does not fit; the largest part is {worst}: lower {ADVICE[worst]}"
    return line


ADVICE = {
    "policy": "the model's size, or take lora.rank=16 with trainer.precision=bf16",
    "rollout copy": "the model's size, or take lora.rank=16, which needs no copy",
    "gradients and optimiser": "the trained weights with lora.rank=16",
    "reference": "the trained weights with lora.rank=16, or take trainer.beta=0",
    "critic": "its size by trainer.critic.model=head",
    "rollout KV": "rollout.rows_per_batch",
    "vLLM weights": "the model's size, or give the workers machines of their own with cluster.num_workers",
    "vLLM KV": "rollout.vllm.kv_cache_mb",
    "verification logits": "rollout.logits_mb",
    "training logits": "trainer.rows_per_pass",
    "co-training logits": "trainer.drafter.tokens_per_update",
}


def free_mb(device) -> float:
    """Free memory in MB of a torch device; of the machine for a CPU."""
    import psutil
    import torch

    return (torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available) / MB
