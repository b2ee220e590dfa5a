"""How often each prompt was rolled out: the number that makes the noise of every visit fresh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class Visits:
    """Counts visits by prompt, whatever the data set does: an epoch is no visit number where prompts occur twice in it,
    are left out of it, come from a stream, or are asked for in between.

    All keys follow from these counts, so they are saved with every checkpoint. Every process of a run counts the rows
    of all.
    """

    def __init__(self, counts: dict[str, int] | None = None):
        self._counts = Counter(counts or {})

    def next(self, example_ids: Sequence[str]) -> list[int]:
        """How often the prompt of each row was rolled out before; the batch is one visit to each of its prompts."""
        before = [self._counts[example_id] for example_id in example_ids]
        self._counts.update(set(example_ids))
        return before

    def state(self) -> dict[str, int]:
        """What `Visits` takes to go on, as JSON types."""
        return dict(self._counts)
