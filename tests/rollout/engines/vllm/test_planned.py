"""Drafts in the scheduler's plan, with a minimal runner V1: samples of each row, limits on the drafts of a step."""

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
from specrl.rollout.engines.vllm.logits import OF_SERVER, LogitsBudget, Remedies
from specrl.rollout.engines.vllm.row import VLLMRow
from specrl.rollout.lossy.lenient import VerifyOldTextOnce
from specrl.rollout.noise import keyed_sample
from specrl.rollout.types import Request, RolloutError
from specrl.rollout.verify import exact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'specrl[vllm]'"),
]
VOCAB = 23
EOS = 1
SAMPLING = [
    SamplingParams(frozenset({EOS})),
    SamplingParams(frozenset({EOS}), 0.7, 5, 0.9),
    SamplingParams(frozenset({EOS}), 0.0),
    SamplingParams(frozenset({EOS}), 0.005),
]


def row_of(key: int, tokens=(), draft=(), sampling: SamplingParams = SAMPLING[0]):
    return VLLMRow(Request([2, 3], key, 100), tokens=list(tokens), draft=Draft(list(draft), "x"), sampling=sampling)


def drafts_of(rows: dict, **settings):
    """A rollout's drafts. Args: settings: arguments of PlannedDrafts."""
    from specrl.rollout.engines.vllm.planned import PlannedDrafts

    defaults = {"drafting": Drafting(), "draft_tokens": 8, "budget": LogitsBudget(1000)}
    return PlannedDrafts(rows=dict(rows), **defaults | settings)


def worker_of(drafts, chunk: int = 1000):
    """The worker's part, in this process."""
    from specrl.rollout.engines.vllm.planned_v1 import KeyedDrafter

    worker = KeyedDrafter(SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB)))
    worker.serve(drafts, chunk, SimpleNamespace(compute_logits=None))
    return worker


def request_of(row: VLLMRow | None):
    """What vLLM's runner knows of a row's request, or of one without a key."""
    from specrl.rollout.engines.vllm.wire import keyed_args

    if row is None:
        return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None), num_tokens=9)
    temperature, top_k, top_p = row.sampling.terms
    temperature = max(temperature, 0.01) if temperature else 0.0  # as vLLM does
    params = SimpleNamespace(
        extra_args=keyed_args(row.request), temperature=temperature, top_k=top_k, top_p=top_p, min_tokens=0
    )
    return SimpleNamespace(sampling_params=params, num_tokens=2 + len(row.tokens))


def step(rows: dict, drafts, pads=None, unfinished=()):
    """The runner and metadata of a step, and its logits. Args: pads: ids of -1 after each draft."""
    inputs = [[*draft, *[-1] * pad] for draft, pad in zip(drafts, pads or [0] * len(drafts), strict=True)]
    counts = list(map(len, inputs))
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=list(rows), sampling_metadata=SimpleNamespace(max_num_logprobs=None)),
        requests={name: request_of(row) for name, row in rows.items()},
        discard_request_mask=SimpleNamespace(np=np.array([name in unfinished for name in rows])),
    )
    ids = torch.tensor([token for row in inputs for token in row], dtype=torch.int32)
    metadata = SimpleNamespace(num_draft_tokens=counts, draft_token_ids=ids)
    logits = torch.randn(len(ids) + len(rows), VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    return runner, metadata, logits


def end(drafts, rows: dict, inputs, output) -> None:
    """The scheduler gets what the worker sampled. Args: inputs: draft tokens of each row, with padding."""
    tokens = [[token for token in row if token >= 0] for row in output.sampled_token_ids.tolist()]
    plan = {name: row for name, row in zip(rows, inputs, strict=True) if row}
    drafts.accept(
        SimpleNamespace(
            total_num_scheduled_tokens=sum(map(len, inputs)) + len(rows), scheduled_spec_decode_tokens=plan
        ),
        SimpleNamespace(req_ids=list(rows), sampled_token_ids=tokens, logprobs=None),
    )


@pytest.mark.parametrize("sampling", [SAMPLING[:1], SAMPLING], ids=["one distribution", "four distributions"])
@pytest.mark.parametrize("chunk", [1000, 2])
def test_every_row_gets_the_samples_of_its_positions(monkeypatch, sampling, chunk):
    """Rows with right, wrong, padded and no drafts, with requests of others and a prompt that is not fully read yet."""
    from vllm.v1.outputs import SamplerOutput

    from specrl.rollout.engines.vllm import planned_v1

    ours = {f"r{i}": row_of(200 + i, [5] * i, sampling=sampling[i % len(sampling)]) for i in range(8)}
    rows = {"other": None, **ours, "late": row_of(9)}
    drafts, pads = [[], *[[4] * (i % 4) for i in range(8)], []], [0, *[i % 3 for i in range(8)], 0]
    *_, logits = step(rows, drafts, pads)
    want, first = {}, 0
    for (name, row), draft, pad in zip(rows.items(), drafts, pads, strict=True):
        if row and name not in ("r6", "late"):
            n = len(draft) + 1
            positions = torch.arange(len(row.tokens), len(row.tokens) + n)
            params = {key: getattr(row.sampling, key) for key in ("temperature", "top_k", "top_p")}
            keys, targets = torch.full((n,), row.request.key), torch.tensor([*draft, 0])
            samples = keyed_sample(logits[first : first + n], keys, positions, targets, **params)
            tokens, logprobs = samples[0].tolist(), samples[1].tolist()
            if name == "r3":
                draft[:] = tokens[:-1]
            stop = next((i for i in range(n - 1) if tokens[i] != draft[i]), n - 1) + 1
            want[name] = tokens[:stop], logprobs[:stop]
        first += len(draft) + pad + 1
    for row, draft in zip(rows.values(), drafts, strict=True):
        if row:
            row.draft = Draft(draft, "x")
    width = 1 + max(len(draft) + pad for draft, pad in zip(drafts, pads, strict=True))
    theirs = torch.full((len(rows), width), 7, dtype=torch.int32)
    monkeypatch.setattr(
        planned_v1, "sample_by_vllm", lambda *_: SamplerOutput(sampled_token_ids=theirs, logprobs_tensors=None)
    )
    runner, metadata, logits = step(rows, drafts, pads, unfinished={"late", "r6"})
    before = {name: len(row.tokens) for name, row in ours.items()}
    planned = drafts_of({name: row for name, row in rows.items() if row})
    output = worker_of(planned, chunk).sample(runner, logits, metadata)
    emitted = output.sampled_token_ids
    assert emitted.dtype == torch.int32
    assert emitted.shape == (len(rows), max(metadata.num_draft_tokens) + 1)
    assert set(emitted[0].tolist()) == {7}, "vLLM's own"
    for name, row_tokens in [*zip(rows, emitted.tolist(), strict=True)][1:]:
        tokens, _ = want.get(name, ([0], []))
        assert row_tokens == [*tokens, *[-1] * (len(row_tokens) - len(tokens))], name
    emitted[[list(rows).index(name) for name in ("r6", "late")]] = -1  # vLLM drops them
    end(planned, rows, [[*draft, *[-1] * pad] for draft, pad in zip(drafts, pads, strict=True)], output)
    for name, (tokens, logprobs) in want.items():
        n = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
        assert ours[name].tokens[before[name] :] == tokens[:n]
        assert ours[name].logprobs == logprobs[:n], "bit for bit"
    assert ours["r6"].tokens == [5] * 6
    assert len(want["r3"][0]) == 4, "all of its draft was accepted"


def test_padding_is_not_sampled(monkeypatch):
    sampled: list[int] = []

    def sample(logits, *columns):
        sampled.append(len(logits))
        return packed_sample(logits, *columns)

    monkeypatch.setattr("specrl.rollout.engines.vllm.planned_v1.packed_sample", sample)
    rows = {"a": row_of(1, [5]), "b": row_of(2, [5])}
    runner, metadata, logits = step(rows, [[4, 4], []], pads=[3, 5])
    worker_of(drafts_of(rows)).sample(runner, logits, metadata)
    assert sampled == [3 + 1]


@pytest.mark.parametrize("redraws", [True, False])
def test_samples_after_a_mismatch_are_kept_where_they_may_be_guesses(redraws):
    from vllm.v1.outputs import DraftTokenIds

    rows = {"a": row_of(1, [5], [4, 4]), "b": row_of(2, [5])}
    runner, metadata, logits = step(rows, [[4, 4], []], pads=[1, 0])
    drafts = drafts_of(rows, drafting=Drafting(redraws=redraws))
    worker = worker_of(drafts)
    want = keyed_sample(logits[:3], torch.full((3,), 1), torch.arange(1, 4))[0].tolist()
    assert want[0] != 4, "the draft is rejected"
    end(drafts, rows, [[4, 4, -1], []], worker.sample(runner, logits, metadata))
    drafts.propose(DraftTokenIds(["a", "b"], worker.propose([])))
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
        worker_of(drafts_of(rows, **settings)).sample(runner, logits, metadata)

    sample([4, 4], rule=rule)
    assert seen == [[4, 4]]
    with pytest.raises(RolloutError, match=r"vLLM verifies the draft tokens \[4, 5\] of .*\[4, 4\]"):
        sample([4, 5], rule=rule)
    sample([4, 5])


def proposals(drafts) -> list[list[int]]:
    """Drafts of the next step."""
    from vllm.v1.outputs import DraftTokenIds

    return drafts.propose(DraftTokenIds(list(drafts.rows), [[] for _ in drafts.rows])).draft_token_ids


def proposed(texts: list[list[int]], **settings) -> list[int]:
    """Lengths of the parts of these drafts that are verified."""
    drafts = drafts_of({str(i): row_of(i, [5]) for i in range(len(texts))}, **settings)
    drafts.drafting.propose = lambda rows, stats: [Draft(text, "x") for text in texts]
    return [len(draft) for draft in proposals(drafts)]


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
    drafts = drafts_of({str(i): row_of(i, [5]) for i in range(4)}, budget=budget)
    drafts.drafting.propose = lambda rows, stats: [Draft([4], "x")] * 4
    drafts.begin()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert proposals(drafts) == [[]] * 4
    (record,) = caplog.records
    assert all(option in record.getMessage() for option in options)


def test_memory_is_measured_when_a_rollout_begins():
    asked: list[int] = []
    budget = LogitsBudget(0, lambda: asked.append(1) or 6)
    drafts = drafts_of({"a": row_of(1, [5]), "b": row_of(2, [5])}, budget=budget)
    drafts.drafting.propose = lambda rows, stats: [Draft([4] * 5, "x") for _ in rows]
    drafts.begin()
    for _ in range(3):
        assert [len(draft) for draft in proposals(drafts)] == [3, 3]
    assert len(asked) == 1


def test_an_old_text_ends_before_the_cap():
    """After the last draft token the policy's own sample must fit too."""
    old_text = Draft([4] * 20, "prefix", [-1.0] * 20)
    row = VLLMRow(Request([2, 3], 1, 6), tokens=[4], sampling=SAMPLING[0], old_text=old_text)
    assert proposals(drafts_of({"r": row}, drafting=VerifyOldTextOnce())) == [[4] * 4]
