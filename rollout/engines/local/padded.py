"""Passes whose attention pads queries per row: the fastest on CPUs, and in float32, which no flash kernel takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specrl.rollout.engines.local.kv import KV

MATMUL_QUERIES = 64  # few queries: plain matrix products are up to twice as fast as the CPU's fused kernel
SPLIT = 1 << 15  # padded (query, key) pairs per head that are worth a separate block


class Pass:
    """The layout of one forward pass: `lengths[i]` >= 1 new tokens for the row at places[i], written from starts[i] on.

    Attention covers a contiguous range of places; those without tokens ride along.

    Args:
        places: of the rows, ascending.
        spread: distance between the positions that neighbouring tokens are told.
    """

    heads_first = True
    draws = False

    def __init__(
        self, kv: KV, places: Sequence[int], starts: Sequence[int], lengths: Sequence[int], device, spread: int = 1
    ):
        self.kv, self.count = kv, len(places)
        self.layers: set[int] = set()
        """Whose attention has run."""
        self._first, self._last = places[0], places[-1] + 1
        of_rows = np.zeros((3, self._last - self._first), np.int64)
        start, length, offset = of_rows
        at = np.asarray(places) - self._first
        start[at], length[at] = starts, lengths
        offset[:] = length.cumsum() - length
        self.width = int((start + length).max())
        self._ends = offset[at] + length[at] - 1
        row = np.arange(len(length)).repeat(length)  # [N]
        self.slots = torch.from_numpy((start - offset)[row] + np.arange(len(row))).to(device)
        """Of each token [N]: where in its row's slab it is written."""
        self.rows = torch.from_numpy(row + self._first).to(device)
        """Of each token [N]: which slab that is."""
        self.positions = self.slots if spread == 1 else self.slots * spread
        self._index: dict[int, Tensor] = {}  # by the number of heads
        blocks = _blocks(length.tolist(), self.width)
        self._blocks = [Block(rows, columns, of_rows, self.width, device) for rows, columns in blocks]

    def ids(self, tokens: Sequence[int]) -> Tensor:
        """The tokens of all rows, one after the other, as the model takes them [1, N]."""
        return torch.as_tensor(tokens, device=self.positions.device)[None]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float
    ) -> Tensor:
        """Writes keys and values, and attends. query [heads, N, dim], key and value [kv_heads, N, dim];
        returns [N, heads, dim]."""
        k, v = (b[self._first : self._last, :, : self.width] for b in self.write(layer, key, value))
        q = query.transpose(0, 1)
        if len(self._blocks) == 1:
            return _attend(self._blocks[0], q, k, v, window, scaling)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        for block in self._blocks:
            out[block.tokens] = _attend(block, q, k, v, window, scaling).to(out.dtype)  # autocast gives another
        return out

    def places(self) -> tuple[Tensor, Tensor]:
        """Of each token [N] where it is written, place * capacity + position; and which tokens are their row's last."""
        ends = torch.from_numpy(self._ends).to(self.slots.device)
        return self.rows * self.kv.capacity + self.slots, ends

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores key, value [heads, N, dim] where the tokens belong; returns the layer's whole slabs."""
        heads = key.shape[0]
        if heads not in self._index:
            head = torch.arange(heads, device=key.device)[:, None]
            self._index[heads] = ((self.rows * heads + head) * self.kv.capacity + self.slots).flatten()
        buffers = self.kv.layer(layer, key, value)
        for buffer, x in zip(buffers, (key, value), strict=True):
            buffer.view(-1, x.shape[-1]).index_copy_(0, self._index[heads], x.reshape(-1, x.shape[-1]))
        return buffers


class Block:
    """Queries that are padded together: the tokens at `columns` [from, to) of some rows; None takes all rows."""

    def __init__(
        self,
        rows: Sequence[int] | None,
        columns: tuple[int, int],
        of_rows: np.ndarray,
        width: int,
        device: torch.device,
    ):
        """Args: of_rows [3, all rows]: where each is written from, its new tokens, and those of the rows before it."""
        self.rows = None if rows is None else torch.tensor(rows, device=device)
        self.queries, self.width = columns[1] - columns[0], width
        start, length, offset = (of_rows if rows is None else of_rows[:, rows])[..., None]
        column = np.arange(*columns)
        valid = column < length  # [R, Q]
        slots = np.where(valid, start + column, 0)
        pad = np.where(valid, offset + column, 0).ravel()  # [R * Q] token of each padded place
        unpad = valid.ravel().nonzero()[0]  # places that hold a token
        given = slots, pad, unpad, pad[unpad]
        self.slots, self.pad, self.unpad, self.tokens = (torch.from_numpy(x).to(device) for x in given)
        self._masks: dict[tuple, Tensor] = {}

    def mask(self, groups: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive attention mask [R, 1, groups * Q, width]: causal, optionally a sliding window."""
        if (groups, window) not in self._masks:
            past = self.slots[:, :, None] - torch.arange(self.width, device=self.slots.device)
            hidden = past < 0
            if window is not None:
                hidden |= past >= window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
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
