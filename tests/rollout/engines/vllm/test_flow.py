"""The hooks in vLLM's step, with a minimal runner: samples of each row, limits on the drafts of a step, stats."""

import importlib.util
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specrl.rollout.drafting.draft import Draft
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.sampler import packed_sample
from specrl.rollout.engines.vllm.batch import LogprobBuffer, VLLMRow
from specrl.rollout.engines.vllm.flow import Flow
from specrl.rollout.engines.vllm.logits import OF_SERVER, LogitsBudget, Remedies
from specrl.rollout.lossy.lenient import VerifyOldTextOnce
from specrl.rollout.noise import keyed_sample
from specrl.rollout.types import Request, RolloutError
from specrl.rollout.verify import exact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'specrl[vllm]'"),
]
SAMPLE = "specrl.rollout.engines.vllm.v1.packed_sample"
VOCAB = 23
SAMPLING = [
    SamplingParams(frozenset({1})),
    SamplingParams(frozenset({1}), 0.7, 5, 0.9),
    SamplingParams(frozenset({1}), 0.0),
]


def adapter_of(rows: dict, chunk: int = 1000, **settings):
    """The adapter of a flow with these rows. Args: settings: arguments of the flow."""
    from specrl.rollout.engines.vllm.v1 import V1Adapter

    logprobs = LogprobBuffer([row for row in rows.values() if row])
    defaults = {"drafting": Drafting(), "logprobs": logprobs, "draft_tokens": 8, "budget": LogitsBudget(1000)}
    return V1Adapter(flow=Flow(rows=rows, **defaults | settings), chunk=chunk)


def row_of(key: int, tokens=(), draft=(), sampling: SamplingParams = SAMPLING[0]):
    return VLLMRow(Request([2, 3], key, 100), tokens=list(tokens), draft=Draft(list(draft), "x"), sampling=sampling)


def step(names, drafts, pads=None, unfinished=()):
    """The runner and metadata of a step, and its logits. Args: pads: ids of -1 after each draft."""
    inputs = [[*draft, *[-1] * pad] for draft, pad in zip(drafts, pads or [0] * len(drafts), strict=True)]
    counts = list(map(len, inputs))
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=list(names)),
        discard_request_mask=SimpleNamespace(np=np.array([name in unfinished for name in names])),
        query_start_loc=SimpleNamespace(np=np.cumsum([0, *(count + 1 for count in counts)])),
    )
    ids = torch.tensor([token for row in inputs for token in row], dtype=torch.int32)
    metadata = SimpleNamespace(num_draft_tokens=counts, draft_token_ids=ids)
    logits = torch.randn(len(ids) + len(names), VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    return runner, metadata, logits


@pytest.mark.parametrize("sampling", [SAMPLING[:1], SAMPLING], ids=["one distribution", "three distributions"])
@pytest.mark.parametrize("chunk", [1000, 2])
def test_every_row_gets_the_samples_of_its_positions(sampling, chunk):
    """Rows with right, wrong, padded and no drafts, with requests of others and a prompt that is not fully read yet."""
    rows = {f"r{i}": row_of(200 + i, [5] * i, sampling=sampling[i % len(sampling)]) for i in range(8)}
    names = ["other", *rows, "late"]
    drafts, pads = [[], *[[4] * (i % 4) for i in range(8)], []], [0, *[i % 3 for i in range(8)], 0]
    *_, logits = step(names, drafts, pads)
    want, first = {}, 0
    for name, draft, pad in zip(names, drafts, pads, strict=True):
        if name in rows and name != "r6":
            row, n = rows[name], len(draft) + 1
            positions = torch.arange(len(row.tokens), len(row.tokens) + n)
            params = {key: getattr(row.sampling, key) for key in ("temperature", "top_k", "top_p")}
            keys, targets = torch.full((n,), row.request.key), torch.tensor([*draft, 0])
            samples = keyed_sample(logits[first : first + n], keys, positions, targets, **params)
            tokens, logprobs = samples[0].tolist(), samples[1].tolist()
            if name == "r3":
                draft[:] = tokens[:-1]
            stop = next((i for i in range(n - 1) if tokens[i] != draft[i] or tokens[i] == 1), n - 1) + 1
            want[name] = tokens[:stop], logprobs[:stop]
        first += len(draft) + pad + 1
    runner, metadata, logits = step(names, drafts, pads, unfinished={"late", "r6"})
    before = {name: len(row.tokens) for name, row in rows.items()}
    adapter = adapter_of(rows, chunk=chunk)
    emitted = adapter.sample(runner, logits, metadata).sampled_token_ids
    assert emitted.dtype == torch.int32
    assert emitted.shape == (len(names), max(metadata.num_draft_tokens) + 1)
    for name, row_tokens in zip(names, emitted.tolist(), strict=True):
        tokens, logprobs = want.get(name, ([0], []))
        assert row_tokens == [*tokens, *[-1] * (len(row_tokens) - len(tokens))], name
        if name in want:
            assert rows[name].tokens[before[name] :] == tokens
            adapter.flow.logprobs.complete(rows[name])
            assert rows[name].logprobs[before[name] :] == logprobs, "bit for bit"
    assert rows["r6"].tokens == [5] * 6
    assert len(want["r3"][0]) == 4, "all of its draft was accepted"


def test_a_step_without_rows_of_ours():
    runner, metadata, logits = step(["a", "b"], [[], []])
    assert adapter_of({}).sample(runner, logits, metadata).sampled_token_ids.tolist() == [[0], [0]]


def test_padding_is_not_sampled(monkeypatch):
    sampled: list[int] = []

    def sample(logits, *columns):
        sampled.append(len(logits))
        return packed_sample(logits, *columns)

    monkeypatch.setattr(SAMPLE, sample)
    rows = {"a": row_of(1, [5]), "b": row_of(2, [5])}
    runner, metadata, logits = step(rows, [[4, 4], []], pads=[3, 5])
    adapter_of(rows).sample(runner, logits, metadata)
    assert sampled == [3 + 1]


@pytest.mark.parametrize("redraws", [True, False])
def test_samples_after_a_mismatch_are_kept_where_they_may_be_guesses(redraws):
    rows = {"a": row_of(1, [5]), "b": row_of(2, [5])}
    runner, metadata, logits = step(rows, [[4, 4], []], pads=[1, 0])
    adapter = adapter_of(rows, drafting=Drafting(redraws=redraws))
    want = keyed_sample(logits[:3], torch.full((3,), 1), torch.arange(1, 4))[0].tolist()
    assert want[0] != 4, "the draft is rejected"
    adapter.sample(runner, logits, metadata)
    assert [*rows["a"].redraws] == (want[1:] if redraws else [])
    assert not rows["b"].redraws


def test_a_rule_that_reads_drafts_gets_those_that_are_verified():
    """The exact rule reads only the verified tokens, so it works if the proposed draft differs. Other rules raise."""
    seen: list[list[int]] = []

    def rule(key, draft, samples):
        seen.append(draft.tokens)
        return exact(key, draft, samples)

    def sample(verified, **settings):
        rows = {"a": row_of(1, [5], [4, 4, 4])}
        runner, metadata, logits = step(rows, [verified])
        adapter_of(rows, **settings).sample(runner, logits, metadata)

    sample([4, 4], rule=rule)
    assert seen == [[4, 4]]
    with pytest.raises(RolloutError, match=r"vLLM verifies .* \[4, 5\] where \[4, 4\] were proposed"):
        sample([4, 5], rule=rule)
    sample([4, 5])


def proposed(drafts: list[list[int]], **settings) -> list[int]:
    """Lengths of the parts of these drafts that are verified."""
    rows = {str(i): row_of(i, [5]) for i in range(len(drafts))}
    adapter = adapter_of(rows, **settings)
    adapter.flow.drafting.propose = lambda rows, stats: [Draft(draft, "x") for draft in drafts]
    return [len(draft) for draft in proposals(adapter)]


def proposals(adapter) -> list[list[int]]:
    """Drafts of the step after one without drafts."""
    runner, metadata, logits = step(adapter.flow.rows, [[]] * len(adapter.flow.rows))
    return adapter.propose(adapter.sample(runner, logits, metadata).sampled_token_ids.tolist())


def test_rows_that_have_a_draft_share_the_budget():
    assert proposed([[4] * 9, [], [], [4] * 3], budget=LogitsBudget(8), draft_tokens=9) == [4, 0, 0, 3]
    assert proposed([[4] * 9] * 4, budget=LogitsBudget(8)) == [2] * 4
    assert proposed([[4] * 9] * 4, budget=LogitsBudget(1000, step=17)) == [3] * 4


@pytest.mark.parametrize(
    ("budget", "options"),
    [
        (LogitsBudget(3), ["rollout.rows_per_batch", "rollout.logits_mb"]),
        (LogitsBudget(9, lambda: 0, remedies=Remedies()), ["rollout.vllm.memory_utilization"]),
        (LogitsBudget(9, step=5, remedies=OF_SERVER), ["max_num_seqs", "max_num_batched_tokens"]),
    ],
)
def test_a_budget_without_room_is_logged_once(caplog, budget, options):
    rows = {str(i): row_of(i) for i in range(4)}
    adapter = adapter_of(rows, budget=budget)
    adapter.flow.drafting.propose = lambda rows, stats: [Draft([4], "x")] * 4
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert proposals(adapter) == [[]] * 4
    (record,) = caplog.records
    assert all(option in record.getMessage() for option in options)


def test_memory_is_measured_when_a_rollout_begins():
    rows = {"a": row_of(1), "b": row_of(2)}
    asked: list[int] = []
    adapter = adapter_of(rows, budget=LogitsBudget(0, lambda: asked.append(1) or 6))
    adapter.flow.drafting.propose = lambda rows, stats: [Draft([4] * 5, "x") for _ in rows]
    for _ in range(3):
        drafts = proposals(adapter)
    assert [len(draft) for draft in drafts] == [3, 3]
    assert len(asked) == 1


def test_an_old_text_ends_before_the_cap():
    """After the last draft token the policy's own sample must fit too."""
    old_text = Draft([4] * 20, "prefix", [-1.0] * 20)
    row = VLLMRow(Request([2, 3], 1, 6), sampling=SAMPLING[0], old_text=old_text)
    flow = Flow(drafting=VerifyOldTextOnce(), draft_tokens=8, budget=LogitsBudget(1000), rows={"r": row})
    assert flow.propose([row]) == [[4] * 5]
