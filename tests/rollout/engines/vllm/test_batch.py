"""Rows that ran through vLLM's steps have the same columns as the rows of any other engine."""

import random

import numpy as np
import pytest

from specrl.rollout.drafting.draft import Draft
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.response import Response
from specrl.rollout.engines.vllm.batch import LogprobBuffer, VLLMRow
from specrl.rollout.engines.vllm.flow import Flow
from specrl.rollout.engines.vllm.logits import LogitsBudget
from specrl.rollout.types import Request
from specrl.rollout.verify import TargetSamples, exact

SAMPLING = SamplingParams(frozenset({1, 2}))
COLUMNS = ("tokens", "logprobs", "behaviour", "reused", "finish", "passes")
ROWS, CAP = 6, 30


def requests(rng: random.Random) -> list[Request]:
    return [Request([3] * rng.randint(1, 4), i, rng.randint(1, CAP)) for i in range(ROWS)]


def step(flow: Flow, rows: list[VLLMRow], texts: np.ndarray, logprobs: np.ndarray, rng: random.Random) -> list:
    """Some rows take part, together with requests of others. Returns each row with its draft and emitted tokens."""
    active = [row for row in rows if row.finish is None and rng.random() < 0.9]
    active = sorted(active, key=lambda row: rng.random()) if rng.random() < 0.3 else active
    batch: list[VLLMRow | None] = [*active, None] if rng.random() < 0.3 else [*active]
    if not active:
        return []
    for row in active:
        right = texts[row.request.key, len(row.tokens) :][: rng.randint(0, 7)].tolist()
        row.draft = Draft([t if rng.random() < 0.9 else 50 for t in right][: row.remaining - 1], rng.choice("ab"))
    pads = [rng.choice([0, 0, 0, 2]) for _ in batch]
    drafts = [[*(row.draft.tokens if row else []), *[-1] * pad] for row, pad in zip(batch, pads, strict=True)]
    tokens = np.array([token for draft in drafts for token in draft], np.int32)
    inputs = flow.verify_inputs(batch, np.array([*map(len, drafts)]), tokens)
    _, keys, positions, _ = inputs.columns
    packed = np.zeros((4, len(inputs.next_draft)), np.int32)
    packed[0, inputs.sampled] = texts[keys, positions]
    packed[1, inputs.sampled] = logprobs[keys, positions].view(np.int32)
    packed[3] = np.float32(1.0).view(np.int32)
    emitted, counts = flow.accept(inputs, flow.drafts_of(inputs), packed)
    new = [emitted[start : start + n].tolist() for start, n in zip(inputs.starts, counts, strict=True)]
    assert all(tokens == [0] for row, tokens in zip(batch, new, strict=True) if row is None)
    return [(row, row.draft, tokens) for row, tokens in zip(batch, new, strict=True) if row]


def differing(seed: int, buffer: type[LogprobBuffer] = LogprobBuffer, kind: type[Flow] = Flow) -> int:
    """Number of rows that differ from the result of `exact` and `Response.emit`."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    texts = noise.integers(1, 40, (ROWS, CAP + 10))
    logprobs = -noise.random((ROWS, CAP + 10), np.float32)
    asked = requests(rng)
    rows, plain = [VLLMRow(request, sampling=SAMPLING) for request in asked], [*map(Response, asked)]
    flow = kind(drafting=Drafting(), draft_tokens=8, budget=LogitsBudget(1000), logprobs=buffer(rows))
    wrong, counted = set(), [0, 0]
    while any(row.finish is None for row in rows):
        for row, draft, emitted in step(flow, rows, texts, logprobs, rng):
            key, size = row.request.key, len(draft.tokens) + 1
            mine = plain[key]
            part = slice(len(mine.tokens), len(mine.tokens) + size)
            its_logprobs = logprobs[key, part].tolist()
            samples = TargetSamples(part.start, texts[key, part].tolist(), its_logprobs, its_logprobs)
            accepted = exact(key, draft, samples)
            n = mine.emit(accepted, SAMPLING.eos_ids)
            counted = [counted[0] + size - 1, counted[1] + min(n, accepted.drafted)]
            if (emitted, row.tokens) != (mine.tokens[-n:], mine.tokens):
                return ROWS
    if (flow.stats.drafted, flow.stats.accepted) != tuple(counted):
        return ROWS
    for row, mine in zip(rows, plain, strict=True):
        if any(getattr(row, name) != getattr(mine, name) for name in COLUMNS):
            wrong.add(row.request.key)
    return len(wrong)


class Overlapping(LogprobBuffer):
    """Planted fault: all rows have the same offset."""

    def __init__(self, rows):
        super().__init__(rows)
        for row in rows:
            row.offset = 0


class Early(LogprobBuffer):
    """Planted fault: the last step is missing."""

    def complete(self, row):
        row.tokens, last = row.tokens[:-1], row.tokens[-1:]
        super().complete(row)
        row.tokens += last


class Stale(Flow):
    """Planted fault: rows that stay in the batch keep the positions of their first step."""

    def accept(self, inputs, drafts, packed):
        before = inputs.batch.num_tokens.copy()
        accepted = super().accept(inputs, drafts, packed)
        inputs.batch.num_tokens[:] = before
        return accepted


def test_a_finished_row_has_every_column():
    assert sum(differing(seed) for seed in range(100)) == 0


@pytest.mark.parametrize("fault", [{"buffer": Overlapping}, {"buffer": Early}, {"kind": Stale}])
def test_control_planted_faults_are_found(fault):
    assert sum(differing(seed, **fault) for seed in range(10)) > 0
