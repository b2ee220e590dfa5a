"""The layout of a packed pass, and the attention that transformers' layers call in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from specrl.rollout.engines.local.kv import KV
from specrl.rollout.types import RolloutError

ATTENTION = "specrl_packed"
_KNOWN = {"sliding_window", "position_ids", "is_causal", "use_cache", "output_attentions"}


class Layout(Protocol):
    """Which rows the tokens of one pass belong to, and how attention runs over them."""

    heads_first: bool
    """How the slabs of KV memory are laid out, see `KV`."""
    kv: KV
    layers: set[int]
    """Layers whose attention has run in this pass."""
    samples: bool
    """The last token of each row is followed by a sampled token."""
    positions: Tensor
    count: int
    """Rows."""
    width: int
    """Positions of the longest row."""

    def __init__(
        self,
        kv: KV,
        slabs: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        device: torch.device,
        positions: Sequence[int] | None = None,
    ): ...
    def ids(self, tokens: Sequence[int] | np.ndarray) -> Tensor: ...
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float
    ) -> Tensor: ...
    def slot_mapping(self) -> Tensor: ...
    def last_tokens(self) -> Tensor: ...


def packed_attention(module, query, key, value, attention_mask, scaling=None, layout: Layout | None = None, **kwargs):
    """Attention of packed passes, with the signature of transformers' AttentionInterface.

    query [1, heads, N, dim], key and value [1, kv_heads, N, dim]; returns ([1, N, heads, dim], None).

    Raises:
        RolloutError: the model asks for something that is not computed here.
    """
    unknown = [name for name, value in kwargs.items() if name not in _KNOWN and _is_on(value)]
    if attention_mask is not None:
        unknown.append("a mask of its own")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown.append("tokens that see later ones")
    if layout is None:
        raise RolloutError(f"its layers do not pass their keyword arguments on to {type(module).__name__}")
    if module.layer_idx in layout.layers:
        unknown.append("to run twice in a pass")
    if unknown:
        wanted = " and ".join(unknown)
        raise RolloutError(
            f"its attention ({type(module).__name__}) asks for {wanted}, which packed passes do not have"
        )
    layout.layers.add(module.layer_idx)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = layout.attend(module.layer_idx, query[0], key[0], value[0], kwargs.get("sliding_window"), scaling)
    return out[None], None


AttentionInterface.register(ATTENTION, packed_attention)


def _is_on(value: object) -> bool:
    """False for an argument that is left out or off: None, False or 0, such as a dropout of 0."""
    return value is not None and not (isinstance(value, (bool, int, float)) and not value)
