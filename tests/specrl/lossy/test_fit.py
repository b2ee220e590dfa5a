"""Fits of judges and routers: statistics by hand, a rule that is learned, and meaningless labels as the control."""

import random

import pytest
import torch

from specrl.lossy.fit import (
    Labels,
    fit_judge,
    logistic,
    roc_auc,
    threshold_for_recall,
)


@pytest.mark.parametrize(
    ("scores", "labels", "want"),
    [
        ([0.1, 0.2, 0.8, 0.9], [False, False, True, True], 1.0),
        ([0.9, 0.1], [False, True], 0.0),
        ([0.5, 0.5], [False, True], 0.5),
        ([0.1, 0.4, 0.35, 0.8], [False, False, True, True], 0.75),
    ],
)
def test_roc_auc_by_hand(scores, labels, want):
    assert roc_auc(scores, labels) == want


@pytest.mark.parametrize(("recall", "want"), [(0.25, 0.9), (0.5, 0.7), (0.51, 0.6), (1.0, 0.2)])
def test_the_threshold_catches_the_share_asked_for(recall, want):
    assert threshold_for_recall([0.9, 0.7, 0.6, 0.2, 0.95], [True, True, True, True, False], recall) == want


def data(n, seed, meaning=True):
    """Rows of unequal scale and offset. The first feature determines the label."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator)
    y = x[:, 0] + 0.3 * torch.randn(n, generator=generator) > 1.0  # the rarer class
    if not meaning:
        y = y[torch.randperm(n, generator=generator)]
    return x * torch.tensor([100.0, 1, 1, 0.01, 1, 1]) + 7, y


def test_a_judge_is_fitted_on_some_problems_and_chosen_on_others():
    x, y = data(400, 0)
    problem = torch.arange(400) // 4  # four mismatches of each
    labels = Labels(x, y, problem)
    fitted, area = fit_judge(labels, 0.9)
    assert area > 0.95
    chances = (x @ fitted.weight + fitted.bias).sigmoid()
    caught = ((chances >= fitted.threshold) & y)[labels.held_out].sum() / y[labels.held_out].sum()
    assert caught >= 0.9
    assert fitted.usual_share == pytest.approx((chances < fitted.threshold).float().mean().item())
    assert area == pytest.approx(roc_auc(chances[labels.held_out].tolist(), y[labels.held_out].tolist()), abs=1e-3)
    assert ((chances > 0.5) & y).sum() / y.sum() > 0.8, "the rarer class weighs as much as the other"
    _, shuffled = fit_judge(Labels(*data(400, 0, meaning=False), problem), 0.9)
    assert shuffled < 0.75, "control: shuffled labels teach nothing"
    broken = x.clone()
    broken[labels.held_out, 0] = -broken[labels.held_out, 0]  # the opposite rule on held-out problems
    assert fit_judge(Labels(broken, y, problem), 0.9)[1] < 0.5, "control: held-out problems are not learned from"
    assert fit_judge(Labels(x, torch.ones(400, dtype=torch.bool), problem), 0.9) is None


def fitted(inputs, targets):
    weights, bias = logistic(torch.tensor(inputs, dtype=torch.float64), torch.tensor(targets), ridge=1e-3)
    return [*weights.tolist(), bias.item()]


def test_logistic_regression_finds_the_distribution_of_the_targets():
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
