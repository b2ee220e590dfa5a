"""Rows of vLLM's flows end with the very columns that any engine's rows have."""

import random

import numpy as np
import pytest

from rollout.engines.base import Sampling
from rollout.engines.response import Response
from rollout.engines.vllm.rows import WAITING, VLLMRow
from rollout.types import Request
from rollout.verify import Stood

EOS = frozenset({1})
COLUMNS = ("tokens", "logprobs", "behaviour", "reused", "finish", "passes")


def steps(rng: random.Random) -> list[Stood]:
    """Draws under the policy's law, and drafts that stood under another, as lossy rules leave them."""
    made = []
    for _ in range(12):
        tokens = [rng.choice([1, *range(2, 60)]) for _ in range(rng.randint(1, 6))]
        own = np.array([rng.random() for _ in tokens], np.float32)
        other = own if rng.random() < 0.7 else [rng.random() for _ in tokens]
        made.append(Stood(tokens, own, other, len(tokens) - 1 if other is own else rng.randint(0, len(tokens))))
    return made


def as_lists(stood: Stood) -> Stood:
    own = stood.logprobs.tolist()
    return Stood(stood.tokens, own, own if stood.behaviour is stood.logprobs else stood.behaviour, stood.drafted)


def columns(rows: type[Response], stood: list[Stood], cap: int) -> list:
    more = {"sampling": Sampling(EOS)} if rows is not Response else {}
    row, counts = rows(Request([2], 3, cap), **more), []
    while row.finish is None and stood:
        step = stood.pop(0)
        if isinstance(row, VLLMRow) and step.behaviour is step.logprobs:
            counts.append(row.take(step.tokens, step.logprobs, EOS))
        else:
            counts.append(row.emit(as_lists(step), EOS))
    return [counts, *(getattr(row, name) for name in COLUMNS)] if row.finish else counts


class Forgetful(VLLMRow):
    """Planted fault: what waits to be written is written otherwise."""

    def write(self):
        self.unwritten = [own[::-1] for own in self.unwritten]
        super().write()


def differing(rows: type[Response]) -> int:
    found = 0
    for seed in range(300):
        made = steps(random.Random(seed))
        found += columns(rows, [*made], 5 + seed % 30) != columns(Response, [*made], 5 + seed % 30)
    return found


@pytest.mark.parametrize(("rows", "equal"), [(VLLMRow, True), (Forgetful, False)], ids=["as it is", "planted fault"])
def test_a_finished_row_has_every_column(rows, equal):
    assert (differing(rows) == 0) == equal


def test_a_long_row_keeps_the_arrays_of_few_steps():
    row, steps, kept = VLLMRow(Request([2], 3, 2000), sampling=Sampling(EOS)), 3 * WAITING, 0
    for i in range(steps):
        row.take([5, 6], np.array([i, -i], np.float32), EOS)
        kept = max(kept, len(row.unwritten))
    row.take([1], np.zeros(1, np.float32), EOS)
    assert kept < WAITING
    assert row.logprobs == row.behaviour == [x for i in range(steps) for x in (i, -i)] + [0.0]
    assert (row.passes, row.reused) == (steps + 1, [True, False] * steps + [False])
