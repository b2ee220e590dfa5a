"""Whether other processes of the trainer still generate their part of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed


class Peers:
    """Lets an engine whose part of a batch has ended go on with the next batch until the other processes are done too.

    Each process begins an asynchronous sum when its part has ended; it is complete when all have. gloo computes it on
    the host, so no device waits. Every process of the trainer makes one of these at the same time.
    """

    def __init__(self) -> None:
        several = distributed.is_initialized() and distributed.get_world_size() > 1
        self._group = distributed.new_group(backend="gloo") if several else None
        self._sum: Any = None

    @contextmanager
    def batch(self, engine: Any) -> Iterator[None]:
        """All processes generate one batch together in such a block. Args: engine: see FillsPasses.others_at_work."""
        if self._group is None or not hasattr(engine, "others_at_work"):
            yield
            return
        self._sum = None
        engine.others_at_work = self._at_work
        try:
            yield
        finally:
            self._at_work()  # the others wait for it
            del engine.others_at_work

    def _at_work(self) -> bool:
        """This process's part has ended: whether another one's has not."""
        if self._sum is None:
            self._sum = distributed.all_reduce(torch.zeros(1), group=self._group, async_op=True)
        return not self._sum.is_completed()
