"""Passes for GPUs: variable-length flash attention over slabs, without a mask, padded queries or a host in between.

Every pass has one of few sizes (`BUCKETS`) and reads everything that changes from one buffer, so it can be captured as
a CUDA graph and replayed. It is padded with tokens that belong to no row and are written after all slabs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from specrl.rollout.engines.local.kv import KV

BUCKETS = (1, 2, 4, 8, 16, 32, *(n << shift for shift in range(5, 12) for n in (2, 3)))
"""Tokens of a pass: at most a third of one is padding from 64 on."""
QUERIES = 64
"""Rows of up to so many tokens give the attention kernel the same shape: the queries of its smallest block."""
COLUMNS = 6
"""Of each token: its id, its position, where it is written, its noise key, the response position that is sampled after
it, and the token that follows it in the text."""


def bucket(tokens: int) -> int:
    """The size of a pass that takes `tokens` tokens; multiples of the largest bucket beyond it."""
    largest = BUCKETS[-1]
    return BUCKETS[bisect_left(BUCKETS, tokens)] if tokens <= largest else -(-tokens // largest) * largest


class StaticPass:
    """The layout of one forward pass; see `padded.PaddedPass`.

    Args:
        slabs: of the rows, ascending.
        positions: of the tokens, which the model is given instead of those in the slabs.

    Attributes:
        size: tokens of the pass, padding included.
        shape: what a captured pass must have in common with this one.
    """

    heads_first = False
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
        self._device = device
        self.layers: set[int] = set()
        start, length, slab = np.asarray(starts), np.asarray(lengths), np.asarray(slabs)
        self.width = int((start + length).max())
        self.tokens = int(length.sum())
        self.size = bucket(self.tokens)
        self.max_queries = QUERIES if length.max() <= QUERIES else self.size
        self.shape = self.size, self.max_queries
        self.buffer: Tensor | None = None
        pinned = torch.device(device).type == "cuda"  # so that the copy needs no wait
        self._host = torch.zeros(COLUMNS * self.size + kv.slabs + 1, dtype=torch.int64, pin_memory=pinned)
        staged = self._host.numpy()
        self._columns = columns = staged[: COLUMNS * self.size].reshape(COLUMNS, self.size)
        slot = np.arange(self.tokens) + (start - (length.cumsum() - length)).repeat(length)  # of each token in its row
        columns[1, : self.tokens] = slot if positions is None else positions
        columns[2, : self.tokens] = slot + slab.repeat(length) * kv.capacity
        columns[2, self.tokens :] = kv.slabs * kv.capacity
        counts = staged[COLUMNS * self.size :].view(np.int32)  # [cu_seqlens_q | seqused_k] of every slab
        queries, used = np.zeros((2, kv.slabs), np.int32)
        queries[slab] = length
        used[slab] = start + length
        counts[1 : kv.slabs + 1] = queries.cumsum()
        counts[kv.slabs + 1 : 2 * kv.slabs + 1] = used

    def fill(self, tokens: Sequence[int] | np.ndarray, *noise: Sequence[int] | np.ndarray) -> None:
        """Stages the tokens and, where tokens are sampled, their keys, response positions and following tokens."""
        self._columns[0, : self.tokens] = tokens
        for column, values in zip(self._columns[3:], noise, strict=False):
            column[: self.tokens] = values

    def send(self, buffer: Tensor | None = None) -> Tensor:
        """Copies everything to the device at once, into `buffer` if a captured pass reads it there."""
        if buffer is None:
            buffer = torch.empty_like(self._host, device=self._device)
        buffer.copy_(self._host, non_blocking=True)
        self.buffer = buffer
        columns = buffer[: COLUMNS * self.size].view(COLUMNS, self.size)
        self._ids, self.positions, self._slot_mapping, self.keys, self.sampled_positions, self.targets = columns
        counts = buffer[COLUMNS * self.size :].view(torch.int32)
        slabs = self.kv.slabs
        self._cu_seqlens_q, self._seqused_k = counts[: slabs + 1], counts[slabs + 1 : 2 * slabs + 1]
        return buffer

    def ids(self, tokens: Sequence[int] | np.ndarray) -> Tensor:
        """The tokens as the model takes them [1, size]; sends them, unless that was done."""
        if self.buffer is None:
            self.fill(tokens)
            self.send()
        return self._ids[None]

    def slot_mapping(self) -> Tensor:
        """See `padded.PaddedPass.slot_mapping`; the padding is written after all slabs."""
        return self._slot_mapping

    def last_tokens(self) -> Tensor:
        """Index of each slab's last token; that of another slab, or of padding, where a slab has no new token."""
        return self._cu_seqlens_q[1:].long() - 1

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float
    ) -> Tensor:
        """See `padded.PaddedPass.attend`."""
        keys, values = self.kv.layer(layer, key, value)
        return torch.ops.specrl.attend(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            keys,
            values,
            slot_mapping=self._slot_mapping,
            cu_seqlens_q=self._cu_seqlens_q,
            cu_seqlens_k=self.kv.cu_seqlens(query.device),
            seqused_k=self._seqused_k,
            max_queries=self.max_queries,
            capacity=self.kv.capacity,
            window=window or 0,
            scaling=scaling,
        )


@torch.library.custom_op("specrl::attend", mutates_args=("keys", "values"))
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor,
    max_queries: int,
    capacity: int,
    window: int,
    scaling: float,
) -> Tensor:
    """Writes N tokens' keys and values into the slabs; each row's queries attend causally to its slab's used positions.

    This body is the reference on any device. On CUDA it is flash attention without a split over keys, so a row's
    result does not depend on the others in its pass.

    Args:
        query: [N, heads, dim]; key, value: [N, kv_heads, dim].
        keys, values: slabs [slabs * capacity + 1, kv_heads, dim].
        slot_mapping: int64 [N], where each token is written.
        cu_seqlens_q: int32 [slabs + 1], where each slab's queries begin; those beyond the last are padding.
        cu_seqlens_k: int32 [slabs + 1], where the slabs begin; seqused_k: int32 [slabs], positions in use, new ones
            included.
        max_queries: of a row; capacity: of a slab. window: of sliding attention; 0 sees all.

    Returns: [N, heads, dim]; undefined for padding.
    """
    keys.index_copy_(0, slot_mapping, key)
    values.index_copy_(0, slot_mapping, value)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    groups = query.shape[1] // key.shape[1]
    first = cu_seqlens_q.tolist()
    for slab, (begin, length) in enumerate(zip(cu_seqlens_k.tolist(), seqused_k.tolist(), strict=False)):
        tokens = slice(first[slab], first[slab + 1])
        count = tokens.stop - tokens.start
        if count:
            k, v = (buffer[begin : begin + length].repeat_interleave(groups, 1) for buffer in (keys, values))
            past = torch.arange(length - count, length)[:, None] - torch.arange(length)
            hidden = (past < 0) | (past >= window) if window else past < 0
            scores = torch.einsum("qhd,khd->hqk", query[tokens] * scaling, k)
            weights = scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(-1)
            out[tokens] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


@attend.register_fake
def _(query, *others) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


aten_flash = torch.ops.aten._flash_attention_forward


@cache
def unsplit(device: torch.device) -> dict[str, int]:
    """The argument that keeps the kernel from splitting over keys, where it takes one; some versions do for FA3 only.

    Without the argument the kernel splits only for single queries or paged keys. Neither happens here: the query count
    that it gets is larger, and the KV is not paged.
    """
    if "num_splits" not in {arg.name for arg in aten_flash.default._schema.arguments}:
        return {}
    x, ends = torch.zeros(1, 1, 64, dtype=torch.bfloat16, device=device), torch.arange(2, device=device).int()
    try:
        aten_flash(x, x, x, ends, ends, QUERIES, 1, 0.0, True, False, num_splits=1)
    except RuntimeError:
        return {}
    return {"num_splits": 1}


@attend.register_kernel("cuda")
def flash(
    query,
    key,
    value,
    keys,
    values,
    slot_mapping,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    max_queries,
    capacity,
    window,
    scaling,
) -> Tensor:
    """See `attend`."""
    keys.index_copy_(0, slot_mapping, key)
    values.index_copy_(0, slot_mapping, value)
    return aten_flash(
        query.contiguous(),
        keys,
        values,
        cu_seqlens_q,
        cu_seqlens_k,
        max_queries,
        capacity,
        0.0,
        True,
        False,
        scale=scaling,
        window_size_left=window - 1 if window else -1,
        window_size_right=0 if window else -1,
        seqused_k=seqused_k,
        **unsplit(query.device),
    )[0]
