"""Captured passes: a pass is captured when its shape comes for the second time, and replayed from then on."""

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
"""Captures a step: returns a function that replays it on the present contents of its buffer, and its results."""


class Graphs:
    """The captured steps of one batch. They hold addresses of weights and KV, so they live no longer than these."""

    def __init__(self, record: Record):
        self._record = record
        self._buffers: dict[Hashable, Tensor] = {}
        self._recorded: dict[Hashable, tuple[Callable[[], None], Any]] = {}
        self._failed = False

    def buffer(self, shape: Hashable) -> Tensor | None:
        """The buffer that a pass of that shape reads; None before the first such pass."""
        return self._buffers.get(shape)

    def run(self, shape: Hashable, buffer: Tensor, step: Step) -> Any:
        """The results of a step on the contents of `buffer`; the next pass of that shape overwrites them."""
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
                    "host",
                    str(error).strip().splitlines()[0],
                )
                return step()
        replay, results = self._recorded[shape]
        replay()
        return results


def cuda_graphs() -> Record:
    """Captures CUDA graphs that share one memory pool, as only one of them runs at a time.

    As `torch.cuda.graph`, but without its garbage collection, which takes longer than the capture, and in a mode that
    ignores what other threads do on the device.
    """
    pool = torch.cuda.graph_pool_handle()
    side_stream = torch.cuda.Stream()

    def record(step: Step) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        side_stream.wait_stream(current)
        with torch.cuda.stream(side_stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = step()
            finally:
                graph.capture_end()
        current.wait_stream(side_stream)
        return graph.replay, results

    return record
