"""Noise keys, and the visits of prompts that they are derived from.

A key is a pure function of (seed, example, sample index, generation), and the generation one of the visit number and
the share of replayed samples (`rollout.replay`). Visits are counted.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from numbers import Integral

from specrl.rollout.types import RolloutError, check_example_id


def derive_key(seed: int, example_id: str, sample_index: int, generation: int, domain: str = "rollout") -> int:
    """The signed 64-bit noise key of a sample. A pure function: losing every cache changes nothing that is sampled.

    Raises:
        RolloutError: the example's id is not a string, or a number is not an integer.
    """
    check_example_id(example_id)
    for name, number in (("seed", seed), ("sample_index", sample_index), ("generation", generation)):
        if not isinstance(number, Integral) or isinstance(number, bool):  # 1.0 would give another text than 1
            raise RolloutError(f"{name}={number!r:.60} of a noise key is not a whole number.")
    text = f"{domain}\x1f{seed}\x1f{example_id}\x1f{sample_index}\x1f{generation}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def turn_id(example_id: str, turn: int) -> str:
    """The id of a later turn of an example, which no other example or turn has, and the example's own for turn 0."""
    if turn == 0:
        return example_id
    return hashlib.blake2b(f"{turn}\x1f{example_id}".encode(), digest_size=16).hexdigest()


def generation(seed: int, example_id: str, sample_index: int, visit: int, share: float) -> int:
    """The visit whose noise this sample uses at `visit` (0, 1, ...): the latest one that is not a replay.

    A visit after the first replays the noise of the one before with probability `share`, decided by a hash, so that the
    result depends on nothing but the arguments. A share of 0 gives `visit`, a share of 1 gives 0.
    """
    while visit > 0 and _unit(derive_key(seed, example_id, sample_index, visit, "replay")) < share:
        visit -= 1
    return visit


def _unit(key: int) -> float:
    return ((key & ((1 << 64) - 1)) >> 11) * 2.0**-53


def occurrences(example_ids: Iterable[str]) -> list[int]:
    """How often each id occurred before: the default sample index of a row."""
    seen: defaultdict[str, Iterator[int]] = defaultdict(count)
    return [next(seen[example_id]) for example_id in example_ids]


class Visits:
    """Counts visits by prompt. An epoch is no visit number if prompts occur twice in it, are left out, or are streamed.

    All keys follow from these counts, so they are saved with every checkpoint. Every process of a run counts the rows
    of all processes.
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
        """The counts as JSON types, from which `Visits` resumes."""
        return dict(self._counts)
