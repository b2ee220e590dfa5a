"""The judge's fit: areas and thresholds by hand, a separable rule, and labels without meaning as the control."""

import pytest
import torch

from specrl.trainers.lossy.fit import roc_auc
from specrl.trainers.lossy.judge import Labels, fit_head, fit_judge, threshold_for_recall


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
    """Rows of unequal scale and offset; the first feature decides."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator)
    y = x[:, 0] + 0.3 * torch.randn(n, generator=generator) > 1.0  # the rarer class
    if not meaning:
        y = y[torch.randperm(n, generator=generator)]
    return x * torch.tensor([100.0, 1, 1, 0.01, 1, 1]) + 7, y


def test_a_rule_is_learned_on_raw_features_and_shuffled_labels_are_not():
    (x, y), (held, truth) = data(400, 0), data(200, 1)
    weight, bias, area = fit_head(x, y, held, truth)
    assert area > 0.95
    assert area == roc_auc((held @ weight + bias).tolist(), truth.tolist())
    chances = (held @ weight + bias).sigmoid()
    caught = ((chances > 0.5) & truth).sum() / truth.sum()
    assert caught > 0.8, "the rarer class weighs as much as the other"
    shuffled, noise = data(400, 0, meaning=False)
    weight, bias, _ = fit_head(shuffled, noise, held, truth)
    assert 0.3 < roc_auc((held[:, 1:] @ weight[1:] + bias).tolist(), truth.tolist()) < 0.7


def test_a_judge_is_fitted_on_some_problems_and_chosen_on_others():
    x, y = data(400, 0)
    problem = torch.arange(400) // 4  # four mismatches of each
    labels = Labels(x, y, problem)
    fitted, area = fit_judge(labels, 0.9)
    assert area > 0.95
    chances = (x @ fitted.weight + fitted.bias).sigmoid()
    caught = ((chances >= fitted.threshold) & y)[labels.held].sum() / y[labels.held].sum()
    assert caught >= 0.9
    broken = x.clone()
    broken[labels.held, 0] = -broken[labels.held, 0]  # what decides on the held-out problems is the opposite
    assert fit_judge(Labels(broken, y, problem), 0.9)[1] < 0.5, "control: held-out problems are not learned from"
    assert fit_judge(Labels(x, torch.ones(400, dtype=torch.bool), problem), 0.9) is None
