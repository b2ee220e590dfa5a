"""When failures are too many: windows of rows, texts that are over a limit by their own doing, what stops at once."""

import pytest

from specrl.reward.base import LimitError, RewardError, Sample
from specrl.reward.set import FAILED_SHARE, WINDOW_BATCHES, WINDOW_PROMPTS, RewardSet


def over_limit(caused_by_text):
    error = LimitError("no result in time")
    error.caused_by_text = caused_by_text
    return error


HARD, STALLED, BROKEN = over_limit(True), over_limit(False), LookupError("no such record")


class Scripted:
    """A reward whose outcome of a sample is its field "outcome"; when asked a second time, "then" if there is one."""

    name = "scripted"

    def __init__(self):
        self.requested = []

    def __call__(self, samples):
        self.requested.append(len(samples))
        key = "then" if len(self.requested) == 2 else "outcome"
        return [sample.fields.get(key, sample.fields["outcome"]) for sample in samples]


def batch(*outcomes, prompts=4, rows=8, first=0):
    """`prompts` with `rows` rows each, named from `first` on; outcomes go to the first row of each prompt, in turns."""
    samples = [Sample(f"prompt {first + i}", "c", None, {"outcome": 1.0}) for _ in range(rows) for i in range(prompts)]
    for sample, outcome in zip(samples, outcomes, strict=False):
        sample.fields["outcome"] = outcome
    return samples


def step_that_stops(batches):
    """The number of the batch at which scoring ends with RewardError; None when it does not."""
    rewards = RewardSet([Scripted()])
    for number, samples in enumerate(batches):
        try:
            rewards.score(samples)
        except RewardError:
            return number
    return None


@pytest.mark.parametrize(("outcome", "stops"), [(HARD, False), (STALLED, True), (BROKEN, True), (None, True)])
def test_hard_texts_never_stop_a_run_and_failures_do(outcome, stops):
    batches = [batch(outcome, outcome, first=4 * i) for i in range(200)]
    assert (step_that_stops(batches) is not None) == stops


@pytest.mark.parametrize("rows", [1, 8])
def test_the_share_is_that_of_the_rows_of_a_full_window(rows):
    allowed = round(FAILED_SHARE * WINDOW_PROMPTS * rows)

    def batches(failures):
        for number in range(4):
            share = failures // 4 + (number < failures % 4)
            yield batch(*[BROKEN] * share, prompts=25, rows=rows, first=25 * number)

    assert step_that_stops(batches(allowed)) is None
    assert step_that_stops(batches(allowed + 1)) == 3


def test_a_bad_step_does_not_decide_alone_and_is_forgotten():
    good = [batch(first=4 * i) for i in range(100)]
    bad = batch(*[BROKEN] * 31)
    assert step_that_stops([*good, bad, *good, bad, *good]) is None
    assert step_that_stops([*good, bad, bad]) == 101


def test_one_prompt_or_row_does_not_decide():
    poisoned = [Sample("poisoned", "c", None, {"outcome": BROKEN}) for _ in range(8)]
    assert step_that_stops([[*batch(prompts=3, first=3 * i), *poisoned] for i in range(50)]) is None


def test_steps_without_any_score_stop_at_once():
    good = [batch(first=4 * i) for i in range(30)]
    assert step_that_stops([batch(*[BROKEN] * 32)]) == 0
    assert step_that_stops([*good, batch(*[BROKEN] * 32)]) == 30
    assert step_that_stops([batch(*[BROKEN] * 8, prompts=2, rows=4), batch(*[None] * 8, prompts=2, rows=4)]) == 1
    assert step_that_stops([batch(*[BROKEN] * 31)]) is None


def test_hard_texts_alone_stop_only_when_a_full_window_has_no_score():
    steps = [batch(*[HARD] * 32, first=4 * i) for i in range(25)]
    assert step_that_stops(steps) == WINDOW_PROMPTS // 4 - 1
    steps = [batch(*[HARD] * (32 - (i == 20)), first=4 * i) for i in range(40)]
    assert step_that_stops(steps) is None
    assert step_that_stops([batch(*[HARD] * 1024, prompts=128) for _ in range(9)]) == WINDOW_BATCHES - 1


@pytest.mark.parametrize(("on_limit", "score"), [("mask", None), ("zero", 0.0)])
def test_a_hard_text_is_masked_and_counted_or_zero(on_limit, score):
    result = RewardSet([Scripted()], on_limit=on_limit).score(batch(HARD, prompts=2, rows=1))
    assert result.total == [score, 1.0]
    assert result.over_limit == {"scripted": 1}


@pytest.mark.parametrize(
    ("outcome", "then", "total"),
    [
        (HARD, HARD, 0.0),
        (HARD, 1.0, 1.0),
        (HARD, STALLED, None),
        (STALLED, HARD, None),
        (BROKEN, 1.0, None),
        (TimeoutError("the judge is slow"), HARD, None),
    ],
)
def test_only_what_is_over_its_limit_twice_is_zero(outcome, then, total):
    rewards = RewardSet([Scripted()], on_limit="zero")
    assert rewards.score([Sample("p", "c", None, {"outcome": outcome, "then": then})]).total == [total]
