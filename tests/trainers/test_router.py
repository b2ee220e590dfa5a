"""Training from valued steps: split, correlation by hand, and that a learnable rule is learned."""

import copy
import random

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from trainers.router import Fit, Record, accuracy_by_class, class_logits, classify, fit, logistic, spearman, split

pytestmark = pytest.mark.usefixtures("one_thread")


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


def classifier(tiny):
    config = copy.deepcopy(tiny("qwen3").config)
    config.num_labels = 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_config(config)


def test_read_out_is_at_the_last_token_whatever_the_padding(tiny):
    model = classifier(tiny).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(15)
    inputs = [[5, 6, 7], [8] * 9, [1]]
    alone = torch.cat([class_logits(model, [ids]) for ids in inputs])
    assert torch.allclose(class_logits(model, inputs), alone, atol=1e-4)
    shorter = class_logits(model, [ids[:-1] or [2] for ids in inputs])
    assert not torch.allclose(shorter, alone, atol=1e-2), "another last token reads otherwise"


def test_logistic_regression_finds_the_law_that_drew_the_targets():
    rng = random.Random(0)
    inputs = [(rng.gauss(0, 1), rng.gauss(0, 1)) for _ in range(4000)]
    odds = [2 * a - b - 0.5 for a, b in inputs]
    targets = [rng.random() < 1 / (1 + 2.718281828**-z) for z in odds]
    found = logistic(inputs, targets)
    assert found == pytest.approx([2, -1, -0.5], abs=0.2)
    assert logistic(inputs[::-1], targets[::-1]) == pytest.approx(found, abs=1e-6)
    shuffled = logistic(inputs, rng.sample(targets, len(targets)))
    assert shuffled[:2] == pytest.approx([0, 0], abs=0.2), "the control: nothing to find"
    separable = logistic([(-1.0,), (1.0,)], [False, True])
    assert 1 < separable[0] < 100


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
