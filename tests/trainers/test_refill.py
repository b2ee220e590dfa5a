"""Dynamic sampling: which groups are replaced, by which, the number of rounds, and its metrics."""

from types import SimpleNamespace

import pytest

from specrl.rollout.types import Completion, RolloutBatch, Row
from specrl.trainers.refill import Refill
from specrl.trainers.scored import Scored

REWARDS = {"equal": (1.0, 1.0), "varied": (0.0, 1.0), "failed": (None, 1.0)}


def scored(ids, rewards, penalties=None) -> Scored:
    """Groups of two rows of such prompts, with the rewards of each group and the length penalties of each row."""
    names = [name for name in ids for _ in range(2)]
    unpenalised = [reward for group in rewards for reward in group]
    penalties = penalties or [0.0] * len(names)
    totals = [None if r is None else r + penalty for r, penalty in zip(unpenalised, penalties, strict=True)]
    n, done = len(names), [Completion([1], [-0.5], [-0.5], [False], "stop", 0, 1) for _ in names]
    batch = RolloutBatch(done, [0] * n, [0] * n, [None] * n, [False] * n, visits=[0] * n)
    return Scored([{}] * n, [Row(name, (1,)) for name in names], batch, totals, unpenalised)


def refilled(step, *rounds, prompts=50, limit=5, penalties=None):
    """The result of refilling, with further groups of such kinds in each round, and the prompts of each round."""
    dataset = [{"example_id": row.example_id} for row in step.rows[::2]]
    dataset += [{"example_id": f"further {i}"} for i in range(prompts)]
    requested, scripted = [], list(rounds)

    def roll_out(rows, first):
        names = [row["example_id"] for row in rows[::2]]
        requested.append(names)
        return scored(names, [REWARDS[kind] for kind in scripted.pop(0)], penalties)

    alone = SimpleNamespace(num_processes=1, process_index=0)
    sampled, chosen, metrics = Refill(limit, 2, dataset, alone, roll_out)(step, seed=0)
    assert len(sampled.rows) == len(step.rows) + 2 * sum(map(len, requested))
    return [row.example_id for row in chosen.rows[::2]], requested, metrics


def step_of(*kinds):
    return scored([f"step {i}" for i in range(len(kinds))], [REWARDS[kind] for kind in kinds])


def test_uniform_groups_are_replaced_in_order_until_none_is_left():
    rounds = (("equal", "varied", "equal", "equal"), ("equal", "varied", "failed"))
    chosen, requested, metrics = refilled(step_of("varied", "equal", "varied", "failed"), *rounds)
    assert list(map(len, requested)) == [4, 3], "2 of 4 had variance and 2 are missing; then 3 of 8, and 1 is missing"
    assert chosen == ["step 0", requested[0][1], "step 2", requested[1][1]]
    assert len({name for names in requested for name in names}) == 7, "no prompt twice, none of the step"
    metrics.pop("reward")
    assert metrics == {"refill/uniform_ratio": 0.5, "refill/rounds": 2, "refill/prompts": 7, "refill/left_ratio": 0.0}


@pytest.mark.parametrize(
    ("prompts", "limit", "rounds", "left"),
    [
        (0, 5, (), 1.0),  # no further prompts
        (1, 5, (("varied",),), 0.5),  # prompts are used up
        (50, 2, (("equal", "equal"), ("equal", "equal")), 1.0),  # rounds are used up
        (50, 0, (), 1.0),
    ],
)
def test_it_ends_when_prompts_or_rounds_are_used_up(prompts, limit, rounds, left):
    _, requested, metrics = refilled(step_of("equal", "equal"), *rounds, prompts=prompts, limit=limit)
    assert metrics["refill/left_ratio"] == left
    assert len(requested) == metrics["refill/rounds"] == len(rounds)


@pytest.mark.parametrize(
    ("rewards", "penalties", "replaced"),
    [
        ([0.0, 0.0], [0.0, -0.5], True),  # all wrong, one of them overlong
        ([0.0, 1.0], [0.0, -1.0], False),  # right and wrong, with equal totals
    ],
)
def test_the_length_penalty_neither_keeps_a_group_nor_replaces_it(rewards, penalties, replaced):
    chosen, requested, _ = refilled(scored(["step"], [rewards], penalties), ("varied",))
    assert chosen == (requested[0] if replaced else ["step"])


def test_a_replacement_has_different_rewards_without_the_penalty():
    chosen, _, metrics = refilled(step_of("equal"), ("equal",), limit=1, penalties=[0.0, -1.0])
    assert (chosen, metrics["refill/left_ratio"]) == (["step 0"], 1.0)
