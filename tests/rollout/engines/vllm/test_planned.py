"""Limits on the drafts of a step; that drafts in the scheduler's plan change no token is tested by test_vllm.py."""

import importlib.util
import logging

import pytest

from specrl.rollout.drafting.draft import Draft
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.vllm.logits import OF_SERVER, LogitsBudget, Remedies
from specrl.rollout.engines.vllm.row import VLLMRow
from specrl.rollout.lossy.lenient import VerifyOldTextOnce
from specrl.rollout.types import Request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'specrl[vllm]'"),
]


def row_of(cap=100, old_text=None) -> VLLMRow:
    return VLLMRow(
        Request([2, 3], 1, cap), tokens=[5], sampling=SamplingParams(frozenset({1})), old_text=old_text or Draft()
    )


def proposals(rows: list[VLLMRow], texts=None, budget=None, drafting=None, steps: int = 1) -> list[list[int]]:
    """Lengths of the drafts that are verified in each of some steps. Args: texts: what is proposed for the rows."""
    from vllm.v1.outputs import DraftTokenIds

    from specrl.rollout.engines.vllm.planned import PlannedDrafts

    drafting = drafting or Drafting()
    if texts:
        drafting.propose = lambda rows, stats: [Draft(text, "x") for text in texts]
    named = {str(i): row for i, row in enumerate(rows)}
    drafts = PlannedDrafts(rows=named, drafting=drafting, draft_tokens=8, budget=budget or LogitsBudget(1000))
    drafts.begin()
    found = []
    for _ in range(steps):
        proposed = drafts.propose(DraftTokenIds([*named], [[] for _ in named]))
        found.append([len(draft) for draft in proposed.draft_token_ids])
    return found


@pytest.mark.parametrize(
    ("budget", "options"),
    [
        (LogitsBudget(3), ["rollout.rows_per_batch"]),
        (LogitsBudget(9, lambda: 0, remedies=Remedies()), ["rollout.vllm.memory_utilization"]),
        (LogitsBudget(9, step=5, remedies=OF_SERVER), ["max_num_seqs", "max_num_batched_tokens"]),
    ],
)
def test_a_budget_without_room_is_logged_once(caplog, budget, options):
    with caplog.at_level(logging.WARNING):
        assert proposals([row_of() for _ in range(4)], [[4]] * 4, budget, steps=3) == [[0] * 4] * 3
    (record,) = [record for record in caplog.records if record.name.startswith("specrl")]
    assert all(option in record.getMessage() for option in options)


def test_rows_that_have_a_draft_share_memory_that_is_measured_when_a_rollout_begins():
    asked: list[int] = []
    budget = LogitsBudget(0, lambda: asked.append(1) or 8)
    assert proposals([row_of() for _ in range(4)], [[4] * 9, [], [], [4] * 3], budget, steps=3) == [[4, 0, 0, 3]] * 3
    assert len(asked) == 1


def test_an_old_text_ends_before_the_cap():
    """After the last draft token the policy's own sample must fit too."""
    old_text = Draft([4] * 20, "prefix", [-1.0] * 20)
    assert proposals([row_of(cap=6, old_text=old_text)], drafting=VerifyOldTextOnce()) == [[4]]
