"""Passes for GPUs: variable-length flash attention over slabs, without a mask, padded queries or a host in between.

Every pass has one of few sizes (`BUCKETS`) and takes all that changes from one buffer, so that it can be captured as a
CUDA graph and replayed: it is filled up with tokens that are written behind all slabs and belong to no row.
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
"""Tokens of a pass: at most a third of one is filling from 64 on."""
QUERIES = 64
"""Tokens of a row up to which passes are alike to the attention kernel: the queries of its smallest block."""
COLUMNS = 6
"""What a pass is told of each token: itself, its position, where it is written, its noise key, its response position,
and the token that follows it in the text."""


def bucket(tokens: int) -> int:
    """The size of a pass that takes `tokens` tokens; multiples of the largest bucket beyond it."""
    most = BUCKETS[-1]
    return BUCKETS[bisect_left(BUCKETS, tokens)] if tokens <= most else -(-tokens // most) * most


class StaticPass:
    """The layout of one forward pass; see `padded.Pass`.

    Args:
        places: of the rows, ascending.
        spread: distance between the positions that neighbouring tokens are told.

    Attributes:
        size: tokens of the pass, filling included.
        shape: what a captured pass must have in common with this one.
    """

    heads_first = False
    draws = False

    def __init__(
        self, kv: KV, places: Sequence[int], starts: Sequence[int], lengths: Sequence[int], device, spread: int = 1
    ):
        self.kv, self.count, self._device = kv, len(places), device
        self.layers: set[int] = set()
        """Whose attention has run."""
        start, length, place = np.asarray(starts), np.asarray(lengths), np.asarray(places)
        self.width, self.tokens = int((start + length).max()), int(length.sum())
        self.size = bucket(self.tokens)
        self.queries = QUERIES if length.max() <= QUERIES else self.size
        self.shape = self.size, self.queries
        self.buffer: Tensor | None = None
        pinned = torch.device(device).type == "cuda"  # so that the copy needs no wait
        self._host = torch.zeros(COLUMNS * self.size + kv.places + 1, dtype=torch.int64, pin_memory=pinned)
        staged = self._host.numpy()
        self._columns = columns = staged[: COLUMNS * self.size].reshape(COLUMNS, self.size)
        slot = np.arange(self.tokens) + (start - (length.cumsum() - length)).repeat(length)  # of each token in its row
        columns[1, : self.tokens] = slot * spread
        columns[2, : self.tokens] = slot + place.repeat(length) * kv.capacity
        columns[2, self.tokens :] = kv.places * kv.capacity
        counts = staged[COLUMNS * self.size :].view(np.int32)  # [cumulative queries | positions used] of every place
        given = np.zeros((2, kv.places), np.int32)
        given[0, place], given[1, place] = length, start + length
        counts[1 : kv.places + 1], counts[kv.places + 1 : 2 * kv.places + 1] = given[0].cumsum(), given[1]

    def fill(self, tokens: Sequence[int], *of_draws: Sequence[int]) -> None:
        """Notes the tokens and, where they are drawn behind, keys, response positions and following tokens."""
        self._columns[0, : self.tokens] = tokens
        for column, given in zip(self._columns[3:], of_draws, strict=False):
            column[: self.tokens] = given

    def send(self, buffer: Tensor | None = None) -> None:
        """Brings all of it to the device in one copy. Args: buffer: of a captured pass, which reads it there."""
        if buffer is None:
            buffer = torch.empty_like(self._host, device=self._device)
        buffer.copy_(self._host, non_blocking=True)
        self.buffer, places = buffer, self.kv.places
        columns = buffer[: COLUMNS * self.size].view(COLUMNS, self.size)
        self._ids, self.positions, self._slots, self.keys, self.at, self.targets = columns
        counts = buffer[COLUMNS * self.size :].view(torch.int32)
        self._queried, self._used = counts[: places + 1], counts[places + 1 : 2 * places + 1]

    def ids(self, tokens: Sequence[int]) -> Tensor:
        """The tokens as the model takes them [1, size]; sends them, unless that was done."""
        if self.buffer is None:
            self.fill(tokens)
            self.send()
        return self._ids[None]

    def places(self) -> tuple[Tensor, Tensor]:
        """See `padded.Pass.places`. A place without tokens names another's last one, or one that belongs to no row."""
        return self._slots, self._queried[1:].long() - 1

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float
    ) -> Tensor:
        """See `padded.Pass.attend`."""
        rows = self._queried, self.kv.begins(query.device), self._used
        keys, values = self.kv.layer(layer, key, value)
        new = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        return torch.ops.specrl.attend(
            *new, keys, values, self._slots, *rows, self.queries, self.kv.capacity, window or 0, scaling
        )


@torch.library.custom_op("specrl::attend", mutates_args=("keys", "values"))
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    queried: Tensor,
    begins: Tensor,
    used: Tensor,
    queries: int,
    capacity: int,
    window: int,
    scaling: float,
) -> Tensor:
    """Writes N tokens' keys and values at their slots; each row's queries attend causally to what is used of its slab.

    This body is the reference, on any device; on CUDA it is flash attention without a split over keys, so that a row's
    result does not depend on the others in its pass.

    Args:
        query: [N, heads, dim]; key, value: [N, kv_heads, dim].
        keys, values: slabs [places * capacity + 1, kv_heads, dim].
        slots: int64 [N].
        queried: int32 [places + 1], where each place's queries begin; those beyond the last belong to no row.
        begins: int32 [places + 1], where the slabs begin; used: int32 [places], positions in use, new ones included.
        queries: most of a row; capacity: of a slab. window: of sliding attention; 0 sees all.

    Returns: [N, heads, dim]; what belongs to no row means nothing.
    """
    keys.index_copy_(0, slots, key)
    values.index_copy_(0, slots, value)
    out, groups = torch.zeros_like(query, memory_format=torch.contiguous_format), query.shape[1] // key.shape[1]
    first = queried.tolist()
    for place, (begin, length) in enumerate(zip(begins.tolist(), used.tolist(), strict=False)):
        tokens = slice(first[place], first[place + 1])
        count = tokens.stop - tokens.start
        if count:
            k, v = (slabs[begin : begin + length].repeat_interleave(groups, 1) for slabs in (keys, values))
            past = torch.arange(length - count, length)[:, None] - torch.arange(length)
            hidden = (past < 0) | (past >= window) if window else past < 0
            scores = torch.einsum("qhd,khd->hqk", query[tokens] * scaling, k)
            law = scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(-1)
            out[tokens] = torch.einsum("hqk,khd->qhd", law, v)
    return out


@attend.register_fake
def _(query, *others) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


aten_flash = torch.ops.aten._flash_attention_forward


@cache
def unsplit(device: torch.device) -> dict[str, int]:
    """What tells the kernel not to split over keys, where it takes that; some versions take it for FA3 only.

    Without, it splits for single queries or paged keys only: it is told of more queries, and slabs are no pages.
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
def flash(query, key, value, keys, values, slots, queried, begins, used, queries, capacity, window, scaling) -> Tensor:
    """See `attend`."""
    keys.index_copy_(0, slots, key)
    values.index_copy_(0, slots, value)
    return aten_flash(
        query.contiguous(),
        keys,
        values,
        queried,
        begins,
        queries,
        capacity,
        0.0,
        True,
        False,
        scale=scaling,
        window_size_left=window - 1 if window else -1,
        window_size_right=0 if window else -1,
        seqused_k=used,
        **unsplit(query.device),
    )[0]
