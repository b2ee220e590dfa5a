"""Captured passes: a step is recorded when its shape comes again, and from then on the device replays it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Step = Callable[[], Any]
"""Computes a pass from its buffer on the device; it may read nothing else that changes from pass to pass."""
Record = Callable[[Step], tuple[Callable[[], None], Any]]
"""Records a step: returns what runs it again on what its buffer then holds, and where its results will be."""


class Graphs:
    """The captured steps of one batch. They hold addresses of weights and KV, so they live no longer than these."""

    def __init__(self, record: Record):
        self._record = record
        self._buffers: dict[Hashable, Tensor] = {}
        self._recorded: dict[Hashable, tuple[Callable[[], None], Any]] = {}
        self._failed = False

    def buffer(self, shape: Hashable) -> Tensor | None:
        """What a pass of that shape is read from; None before the first."""
        return self._buffers.get(shape)

    def run(self, shape: Hashable, buffer: Tensor, step: Step) -> Any:
        """The results of a step on what `buffer` holds; the next pass of that shape overwrites them."""
        if shape not in self._buffers or self._failed:  # a shape that never comes again is not worth a capture
            self._buffers[shape] = buffer
            return step()
        if shape not in self._recorded:
            try:
                self._recorded[shape] = self._record(step)
            except RuntimeError as error:
                self._failed = True
                log.warning(
                    "passes of this model cannot be captured as CUDA graphs (%s), so those of few rows wait for the "
                    "host. rollout.local.graphs=off leaves out the attempt",
                    str(error).strip().splitlines()[0],
                )
                return step()
        replay, results = self._recorded[shape]
        replay()
        return results


def cuda_graphs() -> Record:
    """Records CUDA graphs that share one memory pool, as only one of them runs at a time.

    As `torch.cuda.graph` does, without its collection of garbage, which takes longer than the capture, and without
    minding what other threads do on the device meanwhile.
    """
    pool, beside = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record(step: Step) -> tuple[Callable[[], None], Any]:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = step()
            finally:
                graph.capture_end()
        current.wait_stream(beside)
        return graph.replay, results

    return record
