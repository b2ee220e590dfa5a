"""Training from valued steps: split, correlation by hand, and that a learnable rule is learned."""

import random

import pytest
import torch

from specrl.trainers.lossy.fit import logistic, spearman
from specrl.trainers.lossy.router import Record, accuracy_by_class, split


def test_no_problem_is_learned_from_and_judged_by():
    records = [Record(f"p{i % 20}", (0.0,), (5,), (9,), (10,), 0.0, 0.0) for i in range(100)]
    learning, held = split(records, 0.25, seed=0)
    assert len(learning) + len(held) == 100
    assert {r.problem for r in learning}.isdisjoint({r.problem for r in held})
    assert len({r.problem for r in held}) == 5


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        ([1, 2, 3], [10, 20, 90], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 2, 4], [1, 2, 3, 4], 0.9486832980505138),  # ranks 0, 1.5, 1.5, 3 against 0..3
        ([1, 1, 1], [1, 2, 3], 0.0),
    ],
)
def test_spearman_by_hand(a, b, want):
    assert spearman(a, b) == pytest.approx(want)


def test_accuracy_by_class_by_hand():
    assert accuracy_by_class([0.9, 0.4, 0.6, 0.1], [1, 1, 0, -1], 0.5) == (0.5, 0.5)


def fitted(inputs, targets):
    weights, bias = logistic(torch.tensor(inputs, dtype=torch.float64), torch.tensor(targets), ridge=1e-3)
    return [*weights.tolist(), bias.item()]


def test_logistic_regression_finds_the_law_that_drew_the_targets():
    rng = random.Random(0)
    inputs = [(rng.gauss(0, 1), rng.gauss(0, 1)) for _ in range(4000)]
    odds = [2 * a - b - 0.5 for a, b in inputs]
    targets = [rng.random() < 1 / (1 + 2.718281828**-z) for z in odds]
    found = fitted(inputs, targets)
    assert found == pytest.approx([2, -1, -0.5], abs=0.2)
    assert fitted(inputs[::-1], targets[::-1]) == pytest.approx(found, abs=1e-6)
    shuffled = fitted(inputs, rng.sample(targets, len(targets)))
    assert shuffled[:2] == pytest.approx([0, 0], abs=0.2), "the control: nothing to find"
    separable = fitted([(-1.0,), (1.0,)], [False, True])
    assert 1 < separable[0] < 100
