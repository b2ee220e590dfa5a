"""What layers of transformers call in a packed pass: the tokens of many rows side by side, as a batch of one.

Only attention knows rows. How it runs is the layout's matter: `padded.Pass` on CPUs and in float32, `varlen.StaticPass`
on GPUs. Both write each token's key and value at its row's place and position, so that rolling back rejected tokens is
moving a row's length.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from transformers import AttentionInterface

from specrl.rollout.engines.local.kv import KV
from specrl.rollout.types import RolloutError

ATTENTION = "specrl_ragged"


class Layout(Protocol):
    """Where the tokens of one pass belong."""

    kv: KV
    layers: set[int]
    draws: bool
    """What follows the last token of each row is drawn from this pass."""
    positions: Tensor
    count: int
    """Rows."""
    width: int
    """Positions that the longest row covers."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float
    ) -> Tensor: ...
    def places(self) -> tuple[Tensor, Tensor]: ...


_KNOWN = {"sliding_window", "position_ids", "is_causal", "use_cache", "output_attentions"}


def _asks(value) -> bool:
    """False for an argument that is left out or off: None, False or 0, such as a dropout of 0."""
    return value is not None and not (isinstance(value, (bool, int, float)) and not value)


def ragged_attention(module, query, key, value, attention_mask, scaling=None, ragged: Layout | None = None, **kwargs):
    """Attention for the packed layout, in the form of transformers' AttentionInterface.

    query [1, heads, N, dim], key and value [1, kv_heads, N, dim]; returns ([1, N, heads, dim], None).

    Raises:
        RolloutError: the model asks for what is not computed here.
    """
    unknown = [name for name, value in kwargs.items() if name not in _KNOWN and _asks(value)]
    if attention_mask is not None:
        unknown.append("a mask of its own")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown.append("tokens that see later ones")
    if ragged is None:
        raise RolloutError(f"its layers do not hand on to {type(module).__name__} what they are given")
    if module.layer_idx in ragged.layers:
        unknown.append("to run twice in a pass")
    if unknown:
        wanted = " and ".join(unknown)
        raise RolloutError(f"its attention ({type(module).__name__}) wants {wanted}, which packed passes do not know")
    ragged.layers.add(module.layer_idx)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = ragged.attend(module.layer_idx, query[0], key[0], value[0], kwargs.get("sliding_window"), scaling)
    return out[None], None


AttentionInterface.register(ATTENTION, ragged_attention)
