"""Tiny random causal language models: their distribution is neither flat nor degenerate, and nothing is downloaded."""

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 61
LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
FAMILIES = {
    "gpt2": (
        GPT2Config,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "bos_token_id": 0, "eos_token_id": 1},
    ),
    "llama": (LlamaConfig, LAYERS),
    "mistral": (MistralConfig, LAYERS | {"sliding_window": 6}),
    "qwen2": (Qwen2Config, LAYERS),
    "qwen3": (Qwen3Config, LAYERS | {"head_dim": 8}),
}


def random_model(family: str, seed: int = 0, scale: float = 15.0, **sizes) -> PreTrainedModel:
    """A model with random weights, its matrices multiplied by `scale`, in training mode as a trainer holds it.

    Args: sizes: of its config, in place of those in FAMILIES.
    """
    config, usual = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config(**{"vocab_size": VOCAB, **usual, **sizes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model.train()
