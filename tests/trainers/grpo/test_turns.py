"""Every turn of TRL's conversations: drafts change only the time, and no noise comes twice."""

from __future__ import annotations

import pytest
import torch

from specrl.rollout.config import RolloutConfig
from specrl.rollout.keys import Visits
from specrl.rollout.types import RolloutError
from specrl.trainers.conversations import Conversation, begin, match
from tests.trainers.grpo.scripts import Run, assert_equal, make_conversations, train

EPOCHS = {"num_train_epochs": 2}


def both(folder, **options) -> list[Run]:
    """The same script with drafts and without."""
    return [
        train(folder / acceptance, RolloutConfig(acceptance=acceptance), None, make_conversations, **options)
        for acceptance in ("exact", "off")
    ]


@pytest.fixture(scope="module")
def drafted(tmp_path_factory) -> Run:
    """Three epochs of conversations with tools, with a control step every second batch."""
    config = RolloutConfig(measure_every=2)
    return train(tmp_path_factory.mktemp("tools"), config, script=make_conversations, num_train_epochs=3)


@pytest.mark.slow
def test_turns_with_tools_are_those_without_drafts(drafted, tmp_path):
    config = RolloutConfig(acceptance="off")
    plain = train(tmp_path, config, script=make_conversations, num_train_epochs=3)
    assert max(len(batch.turns) for batch in plain.batches) == 3
    assert_equal(drafted, plain)
    for turn in range(3):
        last = [batch.turns[turn] for batch in drafted.batches[-2:] if len(batch.turns) > turn]
        assert all(t.batch.stats.accepted > t.tokens / 4 for t in last), f"turn {turn} drafts"
    assert not any(batch.accepted for batch in plain.batches)


@pytest.mark.long
@pytest.mark.parametrize("tools", ["async", "environment"])
def test_other_ways_to_several_turns_are_those_without_drafts(tools, tmp_path):
    runs = both(tmp_path, tools=tools, **EPOCHS)
    assert max(len(batch.turns) for batch in runs[0].batches) == 3
    assert_equal(*runs)
    assert runs[0].batches[-1].accepted > 0


@pytest.mark.slow
def test_reuse_is_logged_by_turn_and_measured_on_control_steps(drafted):
    for turn in range(3):
        assert max(drafted.logged(f"spec/reused_ratio_turn{turn}")) > 0.25, turn
    shares = drafted.logged("spec/reused_ratio")
    expected = [b.accepted / sum(map(len, b.tokens)) for b in drafted.batches]
    assert shares == pytest.approx(expected)
    assert len(drafted.logged("spec/speedup")) == len(drafted.batches) // 2
    assert drafted.logged("spec/flips_per_1k") == [0.0] * (len(drafted.batches) // 2)
    assert all(s > 0 for s in drafted.logged("spec/plain_s"))


@pytest.mark.long
@pytest.mark.parametrize("cap", [100, 122])
def test_a_budget_that_ends_within_a_turn_or_a_tool_result_changes_nothing(cap, tmp_path):
    runs = both(tmp_path, max_completion_length=cap, max_tool_calling_iterations=3, **EPOCHS)
    assert_equal(*runs)
    lengths = runs[0].logged("completions/max_length")
    assert max(lengths) <= cap


EVALUATED = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "max_tool_calling_iterations": 1,
    "num_train_epochs": 2,
}


@pytest.mark.slow
def test_a_resumed_script_goes_on_as_if_undisturbed_and_no_key_comes_twice(tmp_path):
    config = RolloutConfig(measure_every=3)
    undisturbed = train(tmp_path, config, script=make_conversations, **EVALUATED)
    training = [key for batch in undisturbed.training for key in batch.keys]
    assert len(set(training)) == len(training), "over all turns"
    assert not {*training} & {key for b in undisturbed.batches if not b.training for key in b.keys}
    resumed = train(tmp_path, config, str(tmp_path / "checkpoint-2"), make_conversations, **EVALUATED)
    later = [b for b in undisturbed.batches if b.step > 2 or (b.step == 2 and b.training)]
    assert [b.keys for b in resumed.batches] == [b.keys for b in later]
    assert [b.tokens for b in resumed.batches] == [b.tokens for b in later]
    assert all(turn.batch.stats.accepted for turn in resumed.batches[0].turns), "the checkpoint holds every turn"
    assert len(resumed.logged("spec/speedup")) == 1, "control steps are counted over the resume"
    weights = resumed.weights
    assert all(torch.equal(tensor, weights[name]) for name, tensor in undisturbed.weights.items())


# Which conversation a row continues --------------------------------------------------------------------------------


def conversations(*prompts: list[int]) -> list[Conversation]:
    return begin(prompts, Visits().next, lambda values: values, 0)


def test_rows_of_a_later_turn_continue_conversations_in_order():
    first, second, third = conversations([1, 2], [1, 2], [3])
    second.tokens = [1, 2, 7]
    assert match([first, second, third], [[1, 2, 7, 8], [3, 5]]) == [first, third], "the first that it may continue"
    first.tokens = [1, 2, 6]
    assert match([first, second, third], [[1, 2, 7, 8], [3, 5]]) == [second, third]
    assert [c.sample_index for c in (first, second, third)] == [0, 1, 0]


def test_a_row_that_continues_no_conversation_is_refused():
    known = conversations([1, 2], [3])
    with pytest.raises(RolloutError, match=r"trl==1\.16\.0"):
        match(known, [[2, 1]])
    with pytest.raises(RolloutError, match="order"):
        match(known, [[3, 4], [1, 2, 4]])


def test_samples_are_numbered_and_visits_counted_over_all_processes():
    visits = Visits()
    parts = iter([[["other", "x"]]])

    def gather(names):
        return [*next(parts), *names]

    (row,) = begin([[1, 2]], visits.next, gather, 1)
    (again,) = begin([[1, 2]], visits.next, lambda names: [*names, *names], 1)
    assert (row.sample_index, row.visit) == (0, 0)
    assert (again.sample_index, again.visit) == (1, 1), "the other process has the same prompt"
