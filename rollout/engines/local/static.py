"""Packed passes on GPUs: of few sizes, without a wait in between, captured where they come again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from specrl.rollout.engines.base import Limits, SamplingParams
from specrl.rollout.engines.local import varlen
from specrl.rollout.engines.local.fused import fused, rms_norms
from specrl.rollout.engines.local.graphs import Graphs, cuda_graphs
from specrl.rollout.engines.local.kv import KV
from specrl.rollout.engines.local.ragged import Drawing, RaggedModel

log = logging.getLogger(__name__)


class StaticModel(RaggedModel):
    """See `RaggedModel`. A pass is one copy to the device, what it computes there, and one copy back.

    Args: graphs of the limits: `off` captures nothing.

    Attributes:
        record: how passes are captured; None: not at all.
    """

    layout = varlen.StaticPass
    overlaps = True

    def __init__(
        self, model: torch.nn.Module, sampling: SamplingParams, limits: Limits | None = None, checked: bool = True
    ):
        self._norms = rms_norms(model)
        super().__init__(model, sampling, limits, checked)
        if self.draw.rounds:
            log.warning("draws come from rounded logits, which flips about one in 300: %s", self.draw.rounds)
        captures = self.device.type == "cuda" and self.limits.graphs == "auto"
        self.record = cuda_graphs() if captures else None

    def kv(self, places: int, capacity: int) -> KV:
        """See `RaggedModel.kv`. Passes over these slabs are captured together."""
        return KV(places, capacity, self.layout.heads_first, Graphs(self.record) if self.record else None)

    def launch(
        self,
        tokens: Sequence[int],
        layout: varlen.StaticPass,
        of_draws: Sequence[np.ndarray],
        picked: np.ndarray | None = None,
    ) -> Drawing:
        """See `RaggedModel.launch`. Draws behind all tokens, as a pass of few sizes must."""
        self.ask_to_stop()
        graphs = layout.kv.graphs if layout.queries == varlen.QUERIES else None
        layout.fill(tokens, *of_draws)
        layout.send(graphs and graphs.buffer(layout.shape))

        def step() -> tuple[Tensor, Tensor]:
            layout.layers.clear()
            hidden = self.decode(layout.ids(tokens), layout)
            return self.draw(hidden, layout.keys, layout.at, layout.targets), hidden

        packed, hidden = graphs.run(layout.shape, layout.buffer, step) if graphs else step()
        if graphs:
            hidden = hidden.clone()  # the next replay overwrites it
        cuda = packed.is_cuda
        on_host = torch.empty(packed.shape, dtype=torch.int32, pin_memory=cuda)
        on_host.copy_(packed, non_blocking=True)
        done = torch.cuda.Event() if cuda else None
        if done:
            done.record()
        return Drawing(on_host[:, : len(tokens)], hidden, np.arange(len(tokens)) if picked is None else picked, done)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """See `RaggedModel.inference`."""
        with fused(self._norms), super().inference():
            yield
