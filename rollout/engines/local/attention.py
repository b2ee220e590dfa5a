"""Attention over ragged rows: packed queries, a KV cache with per-row write positions.

Only attention knows rows: it writes each token's key and value at (row, position), and pads queries per row. Rolling
back rejected tokens is moving a row's length; no re-alignment, no padding growth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from rollout.types import RolloutError

ATTENTION = "specrl_ragged"
MATMUL_QUERIES = 64  # few queries: plain matrix products are up to twice as fast as the CPU's fused kernel
SPLIT = 1 << 15  # padded (query, key) pairs per head that are worth a separate block


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

    def __init__(
        self,
        kv: RaggedKV,
        first: int,
        starts: Sequence[int],
        lengths: Sequence[int],
        device: torch.device,
    ):
        self.kv, self.first, self.count = kv, first, len(starts)
        self.layers: set[int] = set()
        """Whose attention has run."""
        self.width = max(s + n for s, n in zip(starts, lengths, strict=True))
        kv.reserve(self.width)
        length, start = torch.tensor(lengths, device=device), torch.tensor(starts, device=device)
        offset = length.cumsum(0) - length
        row = torch.arange(self.count, device=device).repeat_interleave(length)  # [N]
        self.slots = self.positions = start[row] + torch.arange(len(row), device=device) - offset[row]  # [N]
        self.rows = first + row
        self.blocks = [
            Block(rows, columns, start, length, offset, self.width) for rows, columns in _blocks(lengths, self.width)
        ]


class Block:
    """Queries that are padded together: the tokens at `columns` [from, to) of some rows; None takes all rows."""

    def __init__(
        self,
        rows: Sequence[int] | None,
        columns: tuple[int, int],
        start: Tensor,
        length: Tensor,
        offset: Tensor,
        width: int,
    ):
        self.rows = None if rows is None else torch.tensor(rows, device=start.device)
        self.queries, self.width = columns[1] - columns[0], width
        if rows is not None:
            start, length, offset = start[self.rows], length[self.rows], offset[self.rows]
        column = torch.arange(*columns, device=start.device)
        valid = column < length[:, None]  # [R, Q]
        self.slots = torch.where(valid, start[:, None] + column, 0)
        self.pad = torch.where(valid, offset[:, None] + column, 0).flatten()  # [R * Q] token of each padded place
        self.unpad = valid.flatten().nonzero()[:, 0]  # places that hold a token
        self.tokens = self.pad[self.unpad]
        self._masks: dict[tuple, Tensor] = {}

    def mask(self, groups: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive attention mask [R, 1, groups * Q, width]: causal, optionally a sliding window."""
        if (groups, window) not in self._masks:
            past = self.slots[:, :, None] - torch.arange(self.width, device=self.slots.device)
            seen = past >= 0
            if window is not None:
                seen &= past < window
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self._masks[groups, window] = mask.repeat(1, groups, 1)[:, None]
        return self._masks[groups, window]


def _blocks(lengths: Sequence[int], width: int) -> Iterator[tuple[list[int] | None, tuple[int, int]]]:
    """Rows and query columns of each block: split at the median length while that spares enough padding."""
    rows, done = [r for r, n in enumerate(lengths) if n], 0
    while rows:
        ordered = sorted(lengths[r] for r in rows)
        middle, longest = ordered[len(rows) // 2], ordered[-1]
        longer = [r for r in rows if lengths[r] > middle]
        if (len(rows) - len(longer)) * (longest - middle) * width < SPLIT:
            middle, longer = longest, []
        everyone = not done and 2 * len(rows) > len(lengths)  # as a view; a part of the rows is copied
        yield None if everyone else rows, (done, middle)
        rows, done = longer, middle


_KNOWN = {"sliding_window", "position_ids", "is_causal", "use_cache", "output_attentions"}


def _asks(value) -> bool:
    """False for an argument that is left out or off: None, False or 0, such as a dropout of 0."""
    return value is not None and not (isinstance(value, (bool, int, float)) and not value)


def ragged_attention(module, query, key, value, attention_mask, scaling=None, ragged: Pass | None = None, **kwargs):
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
    buffers = ragged.kv.write(module.layer_idx, ragged.rows, ragged.slots, key[0], value[0])
    k, v = (b[ragged.first : ragged.first + ragged.count, :, : ragged.width] for b in buffers)
    q, window = query[0].transpose(0, 1), kwargs.get("sliding_window")  # [N, heads, dim]
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    if len(ragged.blocks) == 1:
        return _attend(ragged.blocks[0], q, k, v, window, scaling)[None], None
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    for block in ragged.blocks:
        out[block.tokens] = _attend(block, q, k, v, window, scaling).to(out.dtype)  # autocast gives another
    return out[None], None


def _attend(block: Block, q: Tensor, k: Tensor, v: Tensor, window: int | None, scaling: float) -> Tensor:
    """Attention of the block's tokens [n, heads, dim]. q [N, heads, dim], k and v [R, kv_heads, width, dim].

    The query heads that share a key head are folded into the query axis, so keys and values are never repeated.
    """
    if block.rows is not None:
        k, v = k[block.rows], v[block.rows]
    dense = len(block.tokens) == len(q) == len(block.pad)
    q = (q if dense else q[block.pad]).view(len(k), block.queries, *q.shape[1:])
    rows, length, heads, dim = q.shape
    groups = heads // k.shape[1]
    q = q.view(rows, length, k.shape[1], groups, dim).permute(0, 2, 3, 1, 4).reshape(rows, -1, groups * length, dim)
    mask = block.mask(groups, window, q.dtype)
    if q.device.type == "cpu" and q.shape[2] <= MATMUL_QUERIES:
        out = ((q * scaling) @ k.transpose(-1, -2)).add_(mask).softmax(-1) @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    out = out.view(rows, -1, groups, length, v.shape[-1]).permute(0, 3, 1, 2, 4).reshape(rows * length, heads, -1)
    return out.contiguous() if dense else out[block.unpad]


AttentionInterface.register(ATTENTION, ragged_attention)
