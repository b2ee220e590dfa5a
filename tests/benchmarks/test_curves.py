"""Cost at equal accuracy: by hand, on curves with a known margin, and on what only looks cheaper."""

from math import inf

import numpy as np
import pytest

from benchmarks.curves import Curve, cost_at, cost_saved

PROBLEMS = 200


def test_the_cost_of_an_accuracy_by_hand():
    points = [(1.0, 0.9), (0.0, 0.1), (0.5, 0.7)]  # in any order
    assert cost_at(points, 0.4) == pytest.approx(0.25)
    assert cost_at(points, 0.8) == pytest.approx(0.75)
    assert cost_at(points, 0.05) == 0.0
    assert cost_at(points, 0.95) == inf


def test_a_threshold_that_loses_accuracy_is_passed_over():
    assert cost_at([(0.0, 0.1), (0.3, 0.6), (0.5, 0.2), (1.0, 0.9)], 0.55) == pytest.approx(0.27)


def answers(*means, seed):
    """Noisy answers to each problem around means that add the problem's own difficulty."""
    rng = np.random.default_rng(seed)
    hard = rng.normal(0, 0.05, PROBLEMS)
    return np.array([mean + hard + rng.normal(0, 0.05, PROBLEMS) for mean in means])


def curve(seed, *points):
    costs, accuracies = zip(*points, strict=True)
    return Curve(answers(*accuracies, seed=seed), np.repeat(np.array(costs)[:, None], PROBLEMS, axis=1))


ENDS = curve(0, (0.0, 0.4), (50.0, 0.8))


def test_a_known_margin_is_found_within_its_interval():
    rival = curve(1, (20.0, 0.6))  # half of the gap for 20 of 50 tokens
    method = curve(2, (10.0, 0.6))  # and for 10
    saved = cost_saved(method, rival, ENDS, gap=0.5)
    assert saved.low < 0.2 < saved.high
    assert saved.mean == pytest.approx(0.2, abs=0.03)
    assert saved.low > 0, "a margin of this size is no accident"
    other = cost_saved(rival, method, ENDS, gap=0.5)
    assert (other.mean, other.low, other.high) == pytest.approx((-saved.mean, -saved.high, -saved.low))


def test_no_margin_is_found_where_there_is_none():
    saved = cost_saved(curve(1, (20.0, 0.6)), curve(2, (20.0, 0.6)), ENDS, gap=0.5)
    assert saved.low < 0 < saved.high
    same = curve(1, (20.0, 0.6))
    assert cost_saved(same, same, ENDS, gap=0.5).high == 0.0


def test_escalating_less_for_less_accuracy_is_no_saving():
    lazy, eager = curve(1, (12.5, 0.5)), curve(2, (37.5, 0.7))  # both on the line of a coin
    assert (eager.cost.mean() - lazy.cost.mean()) / 50 == 0.5, "what a comparison at unequal accuracy would claim"
    for gap in (0.25, 0.5, 0.75):
        saved = cost_saved(lazy, eager, ENDS, gap)
        assert saved.low < 0 < saved.high
        assert abs(saved.mean) < 0.05
