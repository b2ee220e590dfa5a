"""Noise keys: what one is made of, how often a prompt was visited, and which share of slots replays its last key.

A key is a pure function of (seed, example, slot, generation), and the generation one of the visit number and the shares
of replayed slots so far. Visits are counted; the shares are fixed, or chosen by `rollout/replay.py`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from rollout.types import RolloutError, check_example_id

Cluster = tuple[int, float]
"""Replayed rows of one prompt on one control step, and the sum of their rewards' differences to fresh twins."""


def derive_key(seed: int, example_id: str, slot: int, generation: int, domain: str = "rollout") -> int:
    """The signed 64-bit noise key of a slot. A pure function: losing every cache changes nothing that is sampled.

    Raises:
        RolloutError: the example's id is no text, or a number is not whole.
    """
    check_example_id(example_id)
    for name, number in (("seed", seed), ("slot", slot), ("generation", generation)):
        if not isinstance(number, Integral) or isinstance(number, bool):  # 1.0 would be written otherwise than 1
            raise RolloutError(f"{name}={number!r:.60} of a noise key is not a whole number.")
    text = f"{domain}\x1f{seed}\x1f{example_id}\x1f{slot}\x1f{generation}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def generation(seed: int, example_id: str, slot: int, visit: int, shares: Sequence[float]) -> int:
    """The visit whose noise this slot uses at `visit` (0, 1, ...): the latest one that was not a replay.

    Visit v > 0 replays the noise of the one before with probability `shares[v]`, decided by a hash, so that the result
    depends on nothing but the arguments. Shares of 0 give `visit`, shares of 1 give 0.
    """
    while visit > 0 and _unit(derive_key(seed, example_id, slot, visit, "replay")) < shares[visit]:
        visit -= 1
    return visit


def _unit(key: int) -> float:
    return ((key & ((1 << 64) - 1)) >> 11) * 2.0**-53


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
        before = self.so_far(example_ids)
        self._counts.update(set(example_ids))
        return before

    def so_far(self, example_ids: Sequence[str]) -> list[int]:
        """How often the prompt of each row was rolled out, without counting one more visit."""
        return [self._counts[example_id] for example_id in example_ids]

    def state(self) -> dict[str, int]:
        """What `Visits` takes to go on, as JSON types."""
        return dict(self._counts)


class ReplayControl:
    """The share of each visit so far: a fixed one. All keys follow from it, so it is saved with every checkpoint."""

    def __init__(self, share: float):
        self._share = share
        self.shares: list[float] = []
        """By visit; the first is of no effect, as there is nothing to replay."""

    def until(self, visit: int) -> list[float]:
        """The shares of visits 0 to `visit` and maybe later ones; those not chosen yet are chosen now."""
        while len(self.shares) <= visit:
            self.shares.append(self.choose())
        return self.shares

    def guess(self, visit: int) -> list[float]:
        """The shares of visits 0 to `visit`, without choosing any: one not chosen yet may still become another."""
        share = self.shares[-1] if self.shares else self._share
        return self.shares + [share] * (visit + 1 - len(self.shares))

    def choose(self) -> float:
        """The share of the visit after those in `shares`."""
        return self._share

    def observe(self, clusters: Iterable[Cluster]) -> None:
        """Takes in what a control step measured; every process must pass the clusters of all."""

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON types."""
        return {"shares": self.shares}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.shares = list(state["shares"])
