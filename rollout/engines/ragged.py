"""Ragged batches for transformers models: packed tokens, a KV cache with per-row write positions.

One pass carries N tokens of many rows side by side as a batch of one, so linear layers see no padding at all. Only
attention knows rows: it writes each token's key and value at (row, position), and pads queries per row. Rolling back
rejected tokens is moving a row's length; no re-alignment, no padding growth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

ATTENTION = "specrl_ragged"
MATMUL_QUERIES = 64  # few queries: plain matrix products are up to twice as fast as the CPU's fused kernel


class RaggedKV:
    """Keys and values of R rows per layer, as [R, heads, capacity, dim]; buffers appear and grow when written."""

    def __init__(self, rows: int, capacity: int):
        self.rows, self.capacity = rows, capacity
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, rows: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores key, value [heads, N, dim] at (rows, slots) [N]; returns the whole buffers."""
        heads, _, dim = key.shape
        if layer not in self._layers:
            shape = (self.rows, heads, self.capacity)
            self._layers[layer] = (key.new_zeros(*shape, dim), value.new_zeros(*shape, value.shape[-1]))
        head = torch.arange(heads, device=key.device)[:, None]
        index = ((rows * heads + head) * self.capacity + slots).flatten()  # [heads * N]
        for buffer, x in zip(self._layers[layer], (key, value), strict=True):
            buffer.view(-1, x.shape[-1]).index_copy_(0, index, x.reshape(-1, x.shape[-1]))
        return self._layers[layer]

    def reserve(self, width: int) -> None:
        """Makes room for `width` positions in every row; grows by half at least, so that copies stay amortised."""
        if width > self.capacity:
            extra = max(width, self.capacity + self.capacity // 2) - self.capacity
            pad = (0, 0, 0, extra)
            self._layers = {i: (F.pad(k, pad), F.pad(v, pad)) for i, (k, v) in self._layers.items()}
            self.capacity += extra

    def select(self, rows: Tensor) -> None:
        """Keeps or repeats rows [R'] in the given order."""
        self._layers = {i: (k[rows], v[rows]) for i, (k, v) in self._layers.items()}
        self.rows = len(rows)


class Pass:
    """The layout of one forward pass: `lengths[r]` new tokens for row first + r, written from `starts[r]` on.

    Rows of length 0 ride along without tokens, so that a pass always covers a contiguous range of rows.
    """

    def __init__(self, kv: RaggedKV, first: int, starts: Sequence[int], lengths: Sequence[int], device: torch.device):
        self.kv, self.first, self.count = kv, first, len(starts)
        self.queries, self.width = max(lengths), max(s + n for s, n in zip(starts, lengths, strict=True))
        kv.reserve(self.width)
        length = torch.tensor(lengths, device=device)
        start = torch.tensor(starts, device=device)
        column = torch.arange(self.queries, device=device)
        valid = column < length[:, None]  # [R, Q]
        slots = torch.where(valid, start[:, None] + column, 0)
        self.positions = slots[valid]  # [N]
        self.rows = first + torch.arange(self.count, device=device)[:, None].expand_as(valid)[valid]  # [N]
        self.dense = len(self.positions) == valid.numel()
        self._unpad = valid.flatten().nonzero()[:, 0]  # [N] place of each token in the padded [R * Q]
        self._pad = (valid.flatten().cumsum(0) - 1).clamp(min=0)  # [R * Q] token of each padded place
        self._slots = slots
        self._masks: dict[tuple, Tensor] = {}

    def mask(self, groups: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive attention mask [R, 1, groups * Q, width]: causal by position, optionally a sliding window."""
        if (groups, window) not in self._masks:
            past = self._slots[:, :, None] - torch.arange(self.width, device=self._slots.device)
            seen = (past >= 0) if window is None else (past >= 0) & (past < window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self._masks[groups, window] = mask.repeat(1, groups, 1)[:, None]
        return self._masks[groups, window]

    def pad(self, x: Tensor) -> Tensor:
        """[N, ...] -> [R, Q, ...]"""
        x = x if self.dense else x[self._pad]
        return x.view(self.count, self.queries, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """[R, Q, ...] -> [N, ...]"""
        x = x.reshape(self.count * self.queries, *x.shape[2:])
        return x if self.dense else x[self._unpad]


def ragged_attention(module, query, key, value, attention_mask, scaling=None, ragged: Pass | None = None, **kwargs):
    """Attention for the packed layout, in the form of transformers' AttentionInterface.

    query [1, heads, N, dim], key and value [1, kv_heads, N, dim]; returns ([1, N, heads, dim], None). The query heads
    that share a key head are folded into the query axis, so keys and values are never repeated.
    """
    buffers = ragged.kv.write(module.layer_idx, ragged.rows, ragged.positions, key[0], value[0])
    k, v = (b[ragged.first : ragged.first + ragged.count, :, : ragged.width] for b in buffers)
    q = ragged.pad(query[0].transpose(0, 1))  # [R, Q, heads, dim]
    rows, length, heads, dim = q.shape
    groups = heads // k.shape[1]
    q = q.view(rows, length, k.shape[1], groups, dim).permute(0, 2, 3, 1, 4).reshape(rows, -1, groups * length, dim)
    mask = ragged.mask(groups, kwargs.get("sliding_window"), q.dtype)
    if q.device.type == "cpu" and q.shape[2] <= MATMUL_QUERIES:
        scale = dim**-0.5 if scaling is None else scaling
        out = ((q * scale) @ k.transpose(-1, -2)).add_(mask).softmax(-1) @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    out = out.view(rows, -1, groups, length, v.shape[-1]).permute(0, 3, 1, 2, 4).reshape(rows, length, heads, -1)
    return ragged.unpad(out)[None], None


AttentionInterface.register(ATTENTION, ragged_attention)
