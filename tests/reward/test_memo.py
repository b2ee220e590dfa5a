"""Kept scores: equal to asking again, for rewards that say so only, and never a failure."""

import random
from contextlib import closing

import pytest

import specrl.reward.memo as memo_module
from specrl.reward.base import LimitError, Sample
from specrl.reward.code import CodeReward
from specrl.reward.config import RewardConfig
from specrl.reward.format import FormatReward
from specrl.reward.loading import load_rewards
from specrl.reward.math import MathReward
from specrl.reward.memo import Memo, digest
from specrl.reward.set import RewardSet


class Counting:
    """A deterministic reward that depends on all it sees, fails where it is told to, and counts its rows."""

    name, deterministic = "counting", True

    def __init__(self, failing=(), failure=None):
        self.requested, self.failing, self.failure = [], set(failing), failure

    def __call__(self, samples):
        self.requested += [sample.completion for sample in samples]
        return [self.failure if s.completion in self.failing else self.value(s) for s in samples]

    @staticmethod
    def value(sample):
        seen = (sample.prompt, sample.completion, sample.answer, sorted(sample.fields.items()), sample.messages)
        return float(sum(map(ord, repr(seen))))


def batches(count=30, rows=8):
    rng = random.Random(0)
    for _ in range(count):
        yield [
            Sample(
                rng.choice("pq"),
                rng.choice("abcdef"),
                rng.choice(["1", "2", None]),
                {"n": rng.choice([1, 2])},
                rng.choice([None, [{"role": "user", "content": "p"}]]),
            )
            for _ in range(rows)
        ]


def disagreements():
    """Rows on which a set that keeps scores differs from the reward itself."""
    kept = RewardSet([Counting()])
    return sum(
        total != Counting.value(sample)
        for batch in batches()
        for sample, total in zip(batch, kept.score(batch).total, strict=True)
    )


def test_kept_scores_are_those_of_asking_again():
    reward = Counting()
    kept = RewardSet([reward])
    reused = sum(kept.score(batch).reused["counting"] for batch in batches())
    assert disagreements() == 0
    assert reused == 240 - len(reward.requested) > 100


@pytest.mark.parametrize("part", ["prompt", "completion", "answer", "fields", "messages"])
def test_control_a_key_without_a_part_is_seen(monkeypatch, part):
    blank = {"prompt": "", "completion": "", "answer": None, "fields": {}, "messages": None}[part]

    def short(sample):
        parts = {name: getattr(sample, name) for name in ("prompt", "completion", "answer", "fields", "messages")}
        return digest(Sample(**{**parts, part: blank}))

    monkeypatch.setattr(memo_module, "digest", short)
    assert disagreements() > 0


@pytest.mark.parametrize("failure", [LookupError("down"), LimitError("no result in time")])
def test_failures_are_scored_again_and_never_kept(failure):
    reward = Counting(failing="b", failure=failure)
    kept = RewardSet([reward])
    batch = [Sample("p", "a"), Sample("p", "b")]
    first, second = kept.score(batch), kept.score(batch)
    assert first.total == second.total == [Counting.value(batch[0]), None]
    assert reward.requested == ["a", "b", "b"]
    reward.failing.clear()
    assert kept.score(batch).total == [Counting.value(sample) for sample in batch]
    assert kept.score(batch).reused == {"counting": 2}


class Clock:
    """A reward that depends on when it is asked."""

    name = "clock"
    now = 0.0

    def __call__(self, samples):
        self.now += 1
        return [self.now] * len(samples)


@pytest.mark.parametrize("declared", [None, "yes", True])
def test_only_the_scores_of_a_reward_that_promises_it_are_kept(declared):
    reward = Clock()
    if declared is not None:
        reward.deterministic = declared
    rewards = RewardSet([reward])
    results = [rewards.score([Sample("p", "a")]) for _ in range(2)]
    kept = declared is True
    assert [result.total for result in results] == [[1.0], [1.0 if kept else 2.0]]
    assert [result.reused for result in results] == [{"clock": 0}, {"clock": int(kept)}]


def test_who_promises(tmp_path, monkeypatch):
    text = "def f(prompt, completion, answer): return 1.0\n"
    (tmp_path / "promising_plug_in.py").write_text(text + "def g(*a, **b): return 1.0\ng.deterministic = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert FormatReward().deterministic is MathReward.deterministic is CodeReward.deterministic is True
    with closing(load_rewards(RewardConfig(["promising_plug_in:f", "promising_plug_in:g"]))) as rewards:
        results = [rewards.score([Sample("p", "a")]) for _ in range(2)]
    assert [result.total for result in results] == [[2.0], [2.0]]
    assert results[1].reused == {"f": 0, "g": 1}


def test_memory_is_bounded_and_the_latest_stay():
    memo, requested = Memo(max_rows=2), []

    def ask(samples):
        requested.extend(sample.completion for sample in samples)
        return [1.0] * len(samples)

    for text in "abacb":
        memo.outcomes([Sample("p", text)], ask)
    assert requested == ["a", "b", "c", "b"], "a was used after b, so c took b's place"


def test_a_sample_that_json_cannot_represent_is_always_scored():
    reward = Counting()
    rewards = RewardSet([reward])
    for _ in range(2):
        rewards.score([Sample("p", "a", None, {"image": b"x"})])
    assert reward.requested == ["a", "a"]
