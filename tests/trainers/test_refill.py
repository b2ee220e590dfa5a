"""Dynamic sampling: which groups are replaced, by which, the number of rounds, and its metrics."""

from itertools import count
from types import SimpleNamespace

import pytest

from specrl.rollout.types import Completion, EngineStats, RolloutBatch, Row
from specrl.trainers.refill import Refill, refill, uniform
from specrl.trainers.scored import Scored


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 1.0], True),
        ([0.0, 1.0], False),
        ([None, 1.0, 1.0], True),
        ([None, 1.0, 0.5], False),
        ([None, None], True),
        ([None, 1.0], True),
    ],
)
def test_a_group_is_uniform_when_no_reward_differs(rewards, expected):
    assert uniform(rewards) is expected


def rewards_of(groups):
    """Rewards of groups of two: `d` has zero variance, `v` has variance, `f` failed."""
    return [reward for group in groups for reward in {"d": (1.0, 1.0), "v": (0.0, 1.0), "f": (None, 1.0)}[group]]


def script(*rounds):
    """A roll_out that returns such groups, and the prompts of its calls."""
    asked, left = [], list(rounds)

    def roll_out(prompts):
        asked.append(prompts)
        groups = left.pop(0)
        assert len(groups) == len(prompts)
        return rewards_of(groups)

    return roll_out, asked


def test_uniform_groups_are_replaced_in_order_until_none_is_left():
    roll_out, asked = script("dvdd", "dvf")
    places, metrics = refill(rewards_of("vdvf"), 2, count(10), roll_out, rounds=5)
    assert asked[0] == [10, 11, 12, 13], "half had variance, so two that are missing ask for four"
    assert asked[1] == [14, 15, 16], "one is missing, and 3 of 8 had variance"
    assert places == {1: 1, 3: 5}
    assert metrics == {"refill/uniform_ratio": 0.5, "refill/rounds": 2, "refill/prompts": 7, "refill/left_ratio": 0.0}


@pytest.mark.parametrize(
    ("prompts", "rounds", "script_", "left"),
    [
        (iter(()), 5, (), 1.0),  # nothing to replace
        (iter([7]), 5, ("v",), 0.5),  # no prompts left
        (count(), 2, ("dd", "dd"), 1.0),  # no rounds left
        (count(), 0, (), 1.0),
    ],
)
def test_it_ends_when_prompts_or_rounds_are_used_up(prompts, rounds, script_, left):
    roll_out, asked = script(*script_)
    places, metrics = refill(rewards_of("dd"), 2, prompts, roll_out, rounds)
    assert metrics["refill/left_ratio"] == left
    assert len(asked) == metrics["refill/rounds"] == len(script_)
    assert len(places) == 2 * (1 - left)


def test_a_step_of_varied_groups_asks_for_nothing():
    places, metrics = refill(rewards_of("vv"), 2, count(), script()[0], rounds=5)
    assert places == {}
    assert metrics == {"refill/uniform_ratio": 0, "refill/rounds": 0, "refill/prompts": 0, "refill/left_ratio": 0}


def groups_of(numbers, earned, penalties, size=2) -> Scored:
    """Groups of such prompts, each with these rewards and length penalties."""
    ids = [f"e{number}" for number in numbers for _ in range(size)]
    n, done = len(ids), [Completion([1], [-0.5], [-0.5], [False], "stop", 0, 1) for _ in ids]
    batch = RolloutBatch(done, [0] * n, [0] * n, [None] * n, [False] * n, visits=[0] * n)
    earned, penalties = (each * len(numbers) for each in (earned, penalties))
    totals = [reward + penalty for reward, penalty in zip(earned, penalties, strict=True)]
    return Scored([{"example_id": name} for name in ids], [Row(name, (1,)) for name in ids], batch, totals, earned)


@pytest.mark.parametrize(
    ("earned", "penalties", "replaced"),
    [
        ([0.0, 0.0], [0.0, -0.5], True),  # all wrong, one of them overlong
        ([1.0, 1.0], [-1.0, 0.0], True),  # all right, one of them overlong
        ([0.0, 1.0], [0.0, -1.0], False),  # right and wrong, with equal totals
        ([0.0, 1.0], [0.0, 0.0], False),
    ],
)
def test_the_length_penalty_neither_keeps_a_group_nor_replaces_it(earned, penalties, replaced):
    def roll_out(rows, first):
        return groups_of([7], [0.0, 1.0], [0.0, 0.0])

    alone, dataset = SimpleNamespace(num_processes=1, process_index=0), [{"example_id": "e3"}, {"example_id": "e7"}]
    step = groups_of([3], earned, penalties)
    _, chosen, metrics = Refill(1, 2, list, roll_out)(step, alone, dataset, order=0)
    assert [row.example_id for row in chosen.rows] == ["e7" if replaced else "e3"] * 2
    assert chosen.rewards == ([0.0, 1.0] if replaced else step.rewards), "what is trained on keeps its penalty"
    assert metrics["refill/uniform_ratio"] == float(replaced)


def test_a_penalty_makes_no_replacement_of_a_uniform_group():
    """A replacement must itself have different rewards before the penalty."""
    alone, dataset = SimpleNamespace(num_processes=1, process_index=0), [{"example_id": "e3"}, {"example_id": "e7"}]
    step = groups_of([3], [1.0, 1.0], [0.0, 0.0])
    _, chosen, metrics = Refill(1, 2, list, lambda rows, first: groups_of([7], [0.0, 0.0], [0.0, -1.0]))(
        step, alone, dataset, order=0
    )
    assert [row.example_id for row in chosen.rows] == ["e3", "e3"]
    assert metrics["refill/left_ratio"] == 1.0


def test_batches_add_up_and_can_be_taken_apart():
    def batch(n, first):
        done = [Completion([first + i], [-0.5], [-0.5], [False], "stop", 0, 1) for i in range(n)]
        keys = [first + i for i in range(n)]
        stats = EngineStats(passes=n)
        return RolloutBatch(done, keys, keys, [None] * n, [False] * n, visits=[0] * n, stats=stats, total_s=1.5)

    whole = batch(2, 0) + batch(3, 10) + batch(1, 20)
    assert whole.calls == [2, 3, 1]
    assert (whole.keys, whole.total_s, whole.stats.passes) == ([0, 1, 10, 11, 12, 20], 4.5, 6)
    rows = [Row(f"e{i}", (1,)) for i in range(6)]
    part = Scored([{}] * 6, rows, whole, [float(i) for i in range(6)], [9.0 + i for i in range(6)]).select([5, 2])
    assert [row.example_id for row in part.rows] == ["e5", "e2"]
    assert ([c.tokens for c in part.batch.completions], part.rewards) == ([[20], [10]], [5.0, 2.0])
    assert part.earned == [14.0, 11.0]
    assert (part.batch.keys, part.batch.total_s) == ([20, 10], 0.0), "what it cost is the whole's"
