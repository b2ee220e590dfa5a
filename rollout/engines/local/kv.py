"""KV memory: one slab of positions for each row, allocated once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from specrl.rollout.engines.local.graphs import Graphs


class States:
    """Final hidden states of one model, in slabs like those of `KV`; its passes write them."""

    def __init__(self, slabs: int, capacity: int):
        self._shape = slabs, capacity
        self._buffer: Tensor | None = None

    def write(self, slot_mapping: Tensor, hidden: Tensor) -> None:
        """Args: slot_mapping int64 [N]: slab * capacity + position; hidden [N, H]."""
        self.buffer(hidden.shape[1], hidden.dtype, hidden.device).index_copy_(0, slot_mapping, hidden)

    def buffer(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[slabs * capacity + 2, H]: the padding of a pass is written after all slabs."""
        if self._buffer is None:
            rows, capacity = self._shape
            self._buffer = torch.zeros(rows * capacity + 2, size, dtype=dtype, device=device)
        return self._buffer

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """See `KV.copy`."""
        if self._buffer is not None:
            slabs = self._buffer[:-2].view(*self._shape, -1)[:, :length]
            slabs[targets] = slabs[sources]


class KV:
    """Keys and values of all layers: for each of `slabs` rows a slab of `capacity` positions, written in any order.

    These are slabs and not pages: the attention kernels of every supported torch read them, a row's slab never moves
    under a captured graph, and a rollback of rejected tokens only shortens the row.

    Args:
        slabs: rows at a time.
        capacity: most positions of a row.
        heads_first: slabs are [heads, capacity, dim], as matrix products on CPUs want them, and not
            [capacity, heads, dim], as variable-length attention kernels do. The latter have one position more after
            all slabs, where the padding of a pass is written.
        graphs: the captured passes over these slabs.
    """

    def __init__(self, slabs: int, capacity: int, heads_first: bool = True, graphs: Graphs | None = None):
        self.slabs = slabs
        self.capacity = capacity
        self.heads_first = heads_first
        self.graphs = graphs
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._cu_seqlens: Tensor | None = None
        self.states: States | None = None
        """Where the model's final hidden states are kept, if a head drafts from them."""
        self.policy_states: States | None = None
        """The policy's states of the same rows, in equal slabs, which a head reads."""

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of a layer, allocated at its first pass. Args: key, value: [heads, N, dim], for their shapes."""
        if index not in self._layers:
            self._layers[index] = self._allocate(key), self._allocate(value)
        return self._layers[index]

    def _allocate(self, like: Tensor) -> Tensor:
        heads, _, dim = like.shape
        if not self.heads_first:
            return like.new_empty(self.slabs * self.capacity + 1, heads, dim)
        shape = self.slabs, heads, self.capacity, dim
        if like.device.type != "cpu":
            return like.new_zeros(shape)  # zeros, as masked positions are multiplied by 0
        zeros = np.zeros(math.prod(shape) * like.element_size(), np.uint8)  # pages are mapped where they are written
        return torch.from_numpy(zeros).view(like.dtype).view(shape)

    def keys(self, slab: int, length: int) -> list[Tensor]:
        """The first `length` keys of a slab in every layer."""
        if self.heads_first:
            return [key[slab, :, :length] for key, _ in self._layers.values()]
        first = slab * self.capacity
        return [key[first : first + length] for key, _ in self._layers.values()]

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copies the first `length` positions of the slabs `sources` to the slabs `targets`; they may overlap."""
        for buffer in (buffer for pair in self._layers.values() for buffer in pair):
            slabs = buffer if self.heads_first else buffer[:-1].view(self.slabs, self.capacity, *buffer.shape[1:])
            part = slabs[:, :, :length] if self.heads_first else slabs[:, :length]
            part[targets] = part[sources]
        if self.states is not None:
            self.states.copy(sources, targets, length)

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """int32 [slabs + 1]: the first position of each slab, and the end of the last."""
        if self._cu_seqlens is None:
            self._cu_seqlens = torch.arange(self.slabs + 1, dtype=torch.int32, device=device) * self.capacity
        return self._cu_seqlens

    @property
    def token_bytes(self) -> int:
        """Bytes of one position in all layers that were written."""
        return sum(
            buffer.element_size() * buffer.shape[-1] * buffer.shape[1]
            for pair in self._layers.values()
            for buffer in pair
        )
