"""The estimate of the reuse gap and of its error."""

import math
import random
from statistics import fmean, pstdev

import pytest

from specrl.rollout.replay import reuse_gap


def test_gap_and_error_by_hand():
    gap, error = reuse_gap([(2, 1.0), (1, 0.2)])
    assert gap == pytest.approx(0.4)
    assert error == pytest.approx(math.sqrt(2 * ((1.0 - 0.8) ** 2 + (0.2 - 0.4) ** 2)) / 3)
    assert reuse_gap([(2, 1.0)]) == (0.5, math.inf)
    assert math.isnan(reuse_gap([])[0])


def test_the_error_is_that_of_the_estimate():
    """If rows of a prompt are similar, repetitions vary as estimated. An error from row counts would be too small."""
    rng, found = random.Random(1), []
    for _ in range(600):
        clusters = []
        for _ in range(40):
            n, shift = rng.randint(1, 8), rng.gauss(0.1, 0.5)
            clusters.append((n, sum(rng.gauss(shift, 0.2) for _ in range(n))))
        found.append((*reuse_gap(clusters), sum(n for n, _ in clusters)))
    spread = pstdev(gap for gap, *_ in found)
    assert fmean(gap for gap, *_ in found) == pytest.approx(0.1, abs=0.02)
    assert fmean(error for _, error, _ in found) == pytest.approx(spread, rel=0.1)
    by_rows = fmean(math.sqrt((0.5**2 + 0.2**2) / rows) for *_, rows in found)
    assert by_rows < 0.6 * spread
