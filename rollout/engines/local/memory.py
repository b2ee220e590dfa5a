"""How many rows run at a time: as many as their KV fits, planned before the first pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specrl.rollout.types import Request, RolloutError

if TYPE_CHECKING:
    from specrl.rollout.engines.local.ragged import RaggedModel

SPARE = 0.9
"""Share of the free memory that is planned with; the rest is for what allocators lose between blocks."""
LAYER = 28
"""Activations of a layer per token, in hidden sizes: the residual, queries, keys and values, and a wide MLP's three."""
MB = 2**20


def free_bytes(device: torch.device) -> int:
    """Memory that a rollout may take now: of a GPU with what torch holds in reserve, of the machine for a CPU."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    import psutil

    return psutil.virtual_memory().available


def row_tokens(requests: Sequence[Request]) -> int:
    """Positions of a row's slab: the longest prompt with its response."""
    return max(len(request.prompt) + request.max_new_tokens for request in requests)


def pass_bytes(model: RaggedModel) -> int:
    """What the largest pass needs beside the KV: a chunk of logits, and what one layer makes of the tokens."""
    weight = model.lm_head.weight
    return model.draw.bytes + model.limits.tokens_per_pass * LAYER * weight.shape[1] * weight.element_size()


def places(requests: Sequence[Request], models: Sequence[RaggedModel], most: int) -> int:
    """Rows that the models hold at a time, at most `most`.

    Raises:
        RolloutError: not even one row fits.
    """
    limits, device = models[0].limits, models[0].device
    tokens, each = row_tokens(requests), sum(model.kv_bytes for model in models)
    if limits.kv_cache_mb:
        room = limits.kv_cache_mb * MB
    else:
        room = int(SPARE * free_bytes(device)) - sum(map(pass_bytes, models))
    fitting = min(most, len(requests), limits.rows_per_batch, room // max(1, tokens * each))
    if fitting < 1:
        raise RolloutError(
            f"the KV of one row of {tokens} tokens takes {tokens * each / MB:.0f} MB, and there are "
            f"{max(room, 0) / MB:.0f} MB for it. Use a lower rollout.max_new_tokens, tokens_per_pass "
            f"({limits.tokens_per_pass}) or logits_mb ({limits.logits_mb}), or a higher rollout.local.kv_cache_mb "
            f"({limits.kv_cache_mb}; 0 takes what is free)"
        )
    return fitting
