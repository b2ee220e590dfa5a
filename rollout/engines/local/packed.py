"""A model of transformers with the packed passes that its device wants."""

from __future__ import annotations

import torch

from specrl.rollout.engines.base import Limits, SamplingParams
from specrl.rollout.engines.local.ragged import RaggedModel


def packed_model(
    model: torch.nn.Module, sampling: SamplingParams, limits: Limits | None = None, checked: bool = True
) -> RaggedModel:
    """The model with the passes that its device wants: static ones on CUDA in half precision, else padded rows."""
    if on_gpu(model):
        from specrl.rollout.engines.local.static import StaticModel

        return StaticModel(model, sampling, limits, checked)
    return RaggedModel(model, sampling, limits, checked)


def on_gpu(model: torch.nn.Module) -> bool:
    """True for weights on CUDA in half precision, with heads that flash attention knows, and no autocast around."""
    weight = next(model.parameters(), torch.empty(0))
    if not weight.is_cuda or weight.dtype not in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cuda"):
        return False
    config = model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dim % 8 == 0 and dim <= 256
