"""Training of step classifiers: balance, split, correlation by hand, and that a learnable rule is learned."""

import copy
import random

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rollout.routers.arbitrage import classify
from trainers.router import Fit, Record, accuracy_by_class, balanced, fit, spearman, split

pytestmark = pytest.mark.usefixtures("one_thread")


def record(advantage, problem="a", tokens=(5,)):
    return Record(problem, tokens, (5,), (9,), (10,), 0.0, advantage)


def test_balancing_keeps_the_rarer_class_whole():
    records = [record(0.5)] * 3 + [record(0.0)] * 20 + [record(-0.5)] * 7
    chosen = balanced(records, seed=0)
    assert [r.advantage > 0 for r in chosen] == [True] * 3 + [False] * 3
    assert balanced(records, 0) == chosen
    assert balanced(records[:3], 0) == [], "one class alone teaches nothing"


def test_no_problem_is_learned_from_and_judged_by():
    records = [record(0.0, f"p{i % 20}") for i in range(100)]
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


def classifier(tiny):
    config = copy.deepcopy(tiny("qwen3").config)
    config.num_labels = 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_config(config)


def texts(count, seed):
    rng = random.Random(seed)
    return [[rng.randrange(5, 60) for _ in range(rng.randrange(3, 8))] for _ in range(count)]


def test_a_learnable_rule_is_learned_and_random_labels_are_not(tiny):
    inputs, held = texts(192, 0), texts(96, 1)
    truth = [float(ids[-1] > 30) for ids in held]
    options = Fit(epochs=6, learning_rate=3e-3, batch=32)
    model = classifier(tiny)
    by_epoch = fit(model, inputs, [float(ids[-1] > 30) for ids in inputs], held, truth, options)
    assert max(by_epoch) > 0.6
    assert spearman(classify(model, held), truth) == pytest.approx(max(by_epoch), abs=1e-6), "the best epoch was kept"
    rng = random.Random(2)
    control = fit(classifier(tiny), inputs, [float(rng.random() < 0.5) for _ in inputs], held, truth, options)
    assert control[-1] < 0.4
