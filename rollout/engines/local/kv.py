"""Keys and values of rows: a slab of positions for each, allocated once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from specrl.rollout.engines.local.graphs import Graphs


class States:
    """Last hidden states of the tokens in slabs like those of `KV`, written by the passes of one model."""

    def __init__(self, places: int, capacity: int):
        self._shape = places, capacity
        self._slabs: Tensor | None = None

    def write(self, slots: Tensor, hidden: Tensor) -> None:
        """Args: slots int64 [N]: place * capacity + position; hidden [N, H]."""
        self.slabs(hidden.shape[1], hidden.dtype, hidden.device).index_copy_(0, slots, hidden)

    def slabs(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[places * capacity + 2, H]: what passes are filled up with is written behind all slabs."""
        if self._slabs is None:
            rows, capacity = self._shape
            self._slabs = torch.zeros(rows * capacity + 2, size, dtype=dtype, device=device)
        return self._slabs

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """See `KV.copy`."""
        if self._slabs is not None:
            slabs = self._slabs[:-2].view(*self._shape, -1)[:, :length]
            slabs[targets] = slabs[sources]


class KV:
    """Keys and values per layer: for each of `places` rows a slab of `capacity` positions, written in any order.

    Slabs and not pages: attention kernels of every supported torch read them, a row's place never moves under a
    captured graph, and rolling back rejected tokens is forgetting how far a slab was written.

    Args:
        places: rows at a time.
        capacity: most positions of a row.
        heads_first: slabs are [heads, capacity, dim], as matrix products on CPUs want them, and not
            [capacity, heads, dim], as packed attention kernels do. These get one position more behind all slabs, which
            takes what passes are filled up with.
        graphs: the captured passes over these slabs.
    """

    def __init__(self, places: int, capacity: int, heads_first: bool = True, graphs: Graphs | None = None):
        self.places, self.capacity, self.heads_first, self.graphs = places, capacity, heads_first, graphs
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._begins: Tensor | None = None
        self.states: States | None = None
        """The model's last hidden states, where a head wants them kept."""
        self.given: States | None = None
        """Those that another model keeps of the same rows, in slabs as long, for a head to read."""

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of a layer; allocated at its first pass. Args: key, value: [heads, N, dim], for their shapes."""
        if index not in self._layers:
            self._layers[index] = self._slabs(key), self._slabs(value)
        return self._layers[index]

    def _slabs(self, like: Tensor) -> Tensor:
        heads, _, dim = like.shape
        if not self.heads_first:
            return like.new_empty(self.places * self.capacity + 1, heads, dim)
        shape = (
            self.places,
            heads,
            self.capacity,
            dim,
        )  # zeros: what a mask hides is multiplied by 0
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        zeros = np.zeros(math.prod(shape) * like.element_size(), np.uint8)  # takes memory where it is written only
        return torch.from_numpy(zeros).view(like.dtype).view(shape)

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copies the first `length` positions of the slabs at `sources` to those at `targets`; both may overlap."""
        for buffer in (buffer for pair in self._layers.values() for buffer in pair):
            slabs = buffer if self.heads_first else buffer[:-1].view(self.places, self.capacity, *buffer.shape[1:])
            part = slabs[:, :, :length] if self.heads_first else slabs[:, :length]
            part[targets] = part[sources]
        if self.states is not None:
            self.states.copy(sources, targets, length)

    def begins(self, device: torch.device) -> Tensor:
        """int32 [places + 1]: where each slab begins, and all end."""
        if self._begins is None:
            self._begins = torch.arange(self.places + 1, dtype=torch.int32, device=device) * self.capacity
        return self._begins

    @property
    def token_bytes(self) -> int:
        """Bytes of one position in all layers that were written."""
        return sum(
            buffer.element_size() * buffer.shape[-1] * buffer.shape[1]
            for pair in self._layers.values()
            for buffer in pair
        )
