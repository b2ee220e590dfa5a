"""Diversity of responses, by hand-computed values."""

import pytest

from specrl.rollout.diversity import diversity_metrics, ngrams
from specrl.rollout.types import Row

A = [1, 2, 3, 4, 5, 6]  # 3 distinct 4-grams
B = [1, 2, 3, 4, 5, 9]  # shares two of them
C = [7] * 9  # one distinct 4-gram


def rows(*names: str) -> list[Row]:
    return [Row(name, (1,)) for name in names]


def test_overlap_and_distinct_grams_of_groups_and_old_responses():
    metrics = diversity_metrics(rows("a", "a", "b"), [A, B, C], [A, None, A])
    assert metrics["diversity/distinct_4"] == pytest.approx(5 / 7)
    assert metrics["diversity/group_overlap"] == pytest.approx(2 / 3)
    assert metrics["diversity/old_overlap"] == pytest.approx((3 + 0) / (3 + 2))


def test_pairs_of_three_are_all_counted():
    alike = diversity_metrics(rows("a", "a", "a"), [A, A, B], [None] * 3)
    assert alike["diversity/group_overlap"] == pytest.approx((3 + 2 + 2) / 9)
    assert "diversity/old_overlap" not in alike


def test_control_the_order_of_tokens_matters():
    assert set(ngrams([1, 2, 3, 4])) != set(ngrams([4, 3, 2, 1]))
    assert set(ngrams([0, 0, 0, 1])) != set(ngrams([0, 0, 1, 0]))
