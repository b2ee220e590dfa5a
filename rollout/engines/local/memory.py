"""How many rows run at a time: as many as their KV fits, planned before the first pass."""

from __future__ import annotations

from collections.abc import Sequence

from specrl.rollout.engines.base import free_bytes
from specrl.rollout.engines.local.model import PackedModel
from specrl.rollout.types import Request, RolloutError

SPARE = 0.9
"""Share of the free memory that is planned with; the rest is for what allocators lose between blocks."""
LAYER = 28
"""Activations of a layer per token, in hidden sizes: the residual, queries, keys and values, and a wide MLP's three."""
MB = 2**20


def row_tokens(requests: Sequence[Request]) -> int:
    """Positions of a row's slab: the longest prompt with its response."""
    return max(len(request.prompt) + request.max_new_tokens for request in requests)


def pass_bytes(model: PackedModel) -> int:
    """What the largest pass needs in addition to the KV: a chunk of logits, and one layer's activations."""
    weight = model.lm_head.weight
    return model.sampler.bytes + model.limits.tokens_per_pass * LAYER * weight.shape[1] * weight.element_size()


def max_concurrent_rows(requests: Sequence[Request], models: Sequence[PackedModel], most: int) -> int:
    """Rows whose KV the models can hold at a time, at most `most`.

    Raises:
        RolloutError: not even one row fits.
    """
    limits = models[0].limits
    tokens = row_tokens(requests)
    row_bytes = tokens * sum(model.kv_bytes for model in models)
    if limits.kv_cache_mb:
        kv_bytes = limits.kv_cache_mb * MB
    else:
        kv_bytes = int(SPARE * free_bytes(models[0].device)) - sum(map(pass_bytes, models))
    rows = min(most, len(requests), limits.rows_per_batch, kv_bytes // max(1, row_bytes))
    if rows < 1:
        raise RolloutError(
            f"the KV of one row of {tokens} tokens takes {row_bytes / MB:.0f} MB, and there are "
            f"{max(kv_bytes, 0) / MB:.0f} MB for it. Use a lower rollout.max_new_tokens or tokens_per_pass "
            f"({limits.tokens_per_pass}), or a higher rollout.kv_cache_mb "
            f"({limits.kv_cache_mb}; 0 takes what is free)"
        )
    return rows
