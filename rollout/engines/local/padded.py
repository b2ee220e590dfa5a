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


class PaddedPass:
    """The layout of one forward pass: `lengths[i]` >= 1 new tokens for the row in slab slabs[i], from starts[i] on.

    Attention covers a contiguous range of slabs, those without new tokens included.

    Args:
        slabs: of the rows, ascending.
        positions: [N] that the model is given instead of those in the slabs.
    """

    heads_first = True
    samples = False

    def __init__(
        self,
        kv: KV,
        slabs: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        device: torch.device,
        positions: Sequence[int] | None = None,
    ):
        self.kv = kv
        self.count = len(slabs)
        self.layers: set[int] = set()
        self._first = slabs[0]
        self._end = slabs[-1] + 1
        of_rows = np.zeros((3, self._end - self._first), np.int64)
        start, length, offset = of_rows
        index = np.asarray(slabs) - self._first
        start[index] = starts
        length[index] = lengths
        offset[:] = length.cumsum() - length
        self.width = int((start + length).max())
        self._last_tokens = offset[index] + length[index] - 1
        row = np.arange(len(length)).repeat(length)  # [N]
        self.slots = torch.from_numpy((start - offset)[row] + np.arange(len(row))).to(device)
        """Position of each token [N] in its row's slab."""
        self.rows = torch.from_numpy(row + self._first).to(device)
        """Slab of each token [N]."""
        self.positions = self.slots if positions is None else torch.as_tensor(positions, device=device)
        self._index: dict[int, Tensor] = {}  # by the number of heads
        blocks = _blocks(length.tolist(), self.width)
        self._blocks = [Block(rows, columns, of_rows, self.width, device) for rows, columns in blocks]

    def ids(self, tokens: Sequence[int] | np.ndarray) -> Tensor:
        """The tokens of all rows, one after the other, as the model takes them [1, N]."""
        return torch.as_tensor(tokens, device=self.positions.device)[None]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float
    ) -> Tensor:
        """Writes keys and values, and attends.

        Args: query [heads, N, dim]; key, value [kv_heads, N, dim]; window: of sliding attention.
        Returns: [N, heads, dim].
        """
        k, v = (b[self._first : self._end, :, : self.width] for b in self.write(layer, key, value))
        q = query.transpose(0, 1)
        if len(self._blocks) == 1:
            return _attend(self._blocks[0], q, k, v, window, scaling)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        for block in self._blocks:
            out[block.tokens] = _attend(block, q, k, v, window, scaling).to(out.dtype)  # autocast gives another
        return out

    def slot_mapping(self) -> Tensor:
        """int64 [N]: where each token is written, slab * capacity + position."""
        return self.rows * self.kv.capacity + self.slots

    def last_tokens(self) -> Tensor:
        """Index of each row's last token."""
        return torch.from_numpy(self._last_tokens).to(self.slots.device)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores key, value [heads, N, dim] in the slabs; returns all slabs of the layer."""
        heads = key.shape[0]
        if heads not in self._index:
            head = torch.arange(heads, device=key.device)[:, None]
            self._index[heads] = ((self.rows * heads + head) * self.kv.capacity + self.slots).flatten()
        buffers = self.kv.layer(layer, key, value)
        for buffer, x in zip(buffers, (key, value), strict=True):
            buffer.view(-1, x.shape[-1]).index_copy_(0, self._index[heads], x.reshape(-1, x.shape[-1]))
        return buffers


class Block:
    """Queries that are padded together: the tokens at `columns` [from, to) of some rows.

    Args:
        rows: indices of the rows; None takes all.
        of_rows: [3, all rows]: first position, number of new tokens, and new tokens of the rows before it.
    """

    def __init__(
        self,
        rows: Sequence[int] | None,
        columns: tuple[int, int],
        of_rows: np.ndarray,
        width: int,
        device: torch.device,
    ):
        self.rows = None if rows is None else torch.tensor(rows, device=device)
        self.queries = columns[1] - columns[0]
        self.width = width
        start, length, offset = (of_rows if rows is None else of_rows[:, rows])[..., None]
        column = np.arange(*columns)
        valid = column < length  # [R, Q]
        slots = np.where(valid, start + column, 0)
        pad = np.where(valid, offset + column, 0).ravel()  # [R * Q] token at each padded index
        unpad = valid.ravel().nonzero()[0]  # padded indices that hold a token
        self.slots = torch.from_numpy(slots).to(device)
        self.pad = torch.from_numpy(pad).to(device)
        self.unpad = torch.from_numpy(unpad).to(device)
        self.tokens = torch.from_numpy(pad[unpad]).to(device)
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
    """Rows and query columns of each block: split at the median length while that saves enough padding."""
    rows = [r for r, n in enumerate(lengths) if n]
    done = 0
    while rows:
        ordered = sorted(lengths[r] for r in rows)
        middle, longest = ordered[len(rows) // 2], ordered[-1]
        longer = [r for r in rows if lengths[r] > middle]
        if (len(rows) - len(longer)) * (longest - middle) * width < SPLIT:
            middle = longest
            longer = []
        takes_all = not done and 2 * len(rows) > len(lengths)  # as a view; a part of the rows is copied
        yield None if takes_all else rows, (done, middle)
        rows = longer
        done = middle


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
