"""KV that outlives a call of the engine, for the next call of the same rollout."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specrl.rollout.engines.local.kv import KV


class Session:
    """What slabs hold of rows that have left, by noise key: a later request that continues a row's text needs the rest.

    Args:
        slabs: rows at a time.
        capacity: most positions of a row.
    """

    def __init__(self, slabs: int, capacity: int):
        self.slabs = slabs
        self.capacity = capacity
        self.kv: KV | None = None
        self._rows: dict[int, tuple[int, Sequence[int]]] = {}

    def keep(self, key: int, slab: int, text: Sequence[int]) -> None:
        """A row leaves its slab, which holds these tokens."""
        self._rows[key] = slab, text

    def claim(self, keys: Sequence[int], taken: Collection[int]) -> list[tuple[int, Sequence[int]]]:
        """A slab for each new row and the tokens in it: the row's own if it has one, else one that others need least.

        Args: taken: slabs of rows at work.
        """
        own = [self._rows.pop(key, None) for key in keys]
        used = {*taken, *(found[0] for found in own if found)}
        held = {slab: key for key, (slab, _) in self._rows.items()}
        vacant = iter(sorted({*range(self.slabs)} - used, key=lambda slab: (slab in held, slab)))
        claimed = [found or (next(vacant), ()) for found in own]
        for slab, _ in claimed:
            if slab in held:
                del self._rows[held[slab]]
        return claimed
