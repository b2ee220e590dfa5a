"""A row of a batch with its key and its stored response, and the check that no two rows have the same key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specrl.rollout.types import Completion, RolloutError, Row, Trajectory

Domain = Literal["rollout", "control", "eval"]


@dataclass(frozen=True, slots=True)
class Planned:
    """A row of a batch with its key and its stored response, before the engine runs."""

    row: Row
    sample_index: int
    visit: int
    """How often its prompt was rolled out before."""
    generation: int
    """The visit whose noise it uses: an earlier one if the row is replayed."""
    key: int
    old: Trajectory | None
    """The stored response of its sample."""
    domain: Domain = "rollout"

    def unchanged(self, completion: Completion) -> bool:
        """Whether the response equals the stored one, token for token."""
        return self.old is not None and tuple(completion.tokens) == self.old.tokens


def check_keys(rows: Sequence[Row], sample_indices: Sequence[int], visits: Sequence[int]) -> None:
    """Refuses equal keys: their responses would be equal, and a trainer would treat them as independent.

    Raises:
        RolloutError: also for a number of sample indices or visits that is not that of the rows.
    """
    for name, values in (("sample_indices", sample_indices), ("visit", visits)):
        if len(values) != len(rows):
            raise RolloutError(f"{name} has {len(values)} numbers for {len(rows)} rows: give one for each row")
    seen: set[tuple[str, int]] = set()
    for row, sample_index, visit in zip(rows, sample_indices, visits, strict=True):
        if type(visit) is not int or visit < 0:
            raise RolloutError(
                f"visit={visit!r} of example {row.example_id!r}: expected how often it was rolled out, 0 or more"
            )
        if (row.example_id, sample_index) in seen:
            raise RolloutError(
                f"example {row.example_id!r} has sample_index={sample_index} twice in one batch, and both rows would "
                "be the same response. Number a prompt's rows from 0, or leave `sample_indices` out"
            )
        seen.add((row.example_id, sample_index))
