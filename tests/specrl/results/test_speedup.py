"""The estimator of every speedup: by hand, under stalled and noisy clocks, and against estimators that flatter."""

import random
from statistics import fmean, median

import pytest

from specrl.results.speedup import Speedup, bounded, speedup, student


def noisy(seed: int, steps: int, spread: float) -> tuple[list[float], list[float]]:
    """Own and plain seconds of steps that take 1 s either way, each clock off by `spread`."""
    rng = random.Random(seed)
    own, plain = ([rng.lognormvariate(0, spread) for _ in range(steps)] for _ in "ab")
    return own, plain


def test_no_step_saves_more_than_the_largest_saving_below_the_top_tenth():
    assert bounded([1, 1, 1, 1], [2, 3, 4, 99]) == [2, 3, 4, 4]
    assert bounded([1.0] * 20, [*range(2, 22)])[-4:] == [18, 19, 19, 19], "the top tenth of 20 steps is two"
    assert bounded([5, 2], [4, 9]) == [4, 1], "a loss is not bounded"
    assert bounded([1], [99]) == [1], "a single step cannot save"
    assert bounded([3], [2]) == [2]
    assert bounded([], []) == []


def test_the_ratio_and_its_interval_by_hand():
    # Savings 0, 2, 2, 2, 2, 8; the last counts as 2. R = 16 / 6. Residuals 1 - R once and 3 - R five times:
    # squares add up to 100/36 + 5/9 = 10/3, so s = sqrt(2/3); t of 5 degrees of freedom is 2.571.
    found = speedup([1.0] * 6, [1.0, 3.0, 3.0, 3.0, 3.0, 9.0])
    half = 2.571 * (2 / 3) ** 0.5 * 6**0.5 / 6 * 6 / 5
    assert found.ratio == pytest.approx(16 / 6)
    assert (found.low, found.high) == pytest.approx((16 / 6 - half, 16 / 6 + half), rel=1e-3)
    assert found.told
    assert str(found) == "2.67x (95 % interval 1.64x to 3.69x)"


@pytest.mark.parametrize(("freedom", "published"), [(5, 2.571), (10, 2.228), (15, 2.131), (30, 2.042), (120, 1.980)])
def test_students_quantiles_are_the_published_ones(freedom, published):
    assert student(freedom) == pytest.approx(published, abs=4e-3)


def test_few_steps_claim_nothing():
    found = speedup([1.0] * 5, [9.0] * 5)
    assert (found.ratio, found.low, found.told, found.brief) == (9.0, None, False, "")
    assert str(found) == "too few to tell, 5 of the 6 steps that it takes"
    assert speedup([1.0] * 6, [9.0] * 6).told
    assert speedup([], []) is None


def test_planted_fault_a_stalled_step_claims_nothing():
    own, plain = [1.0] * 16, [1.0] * 15 + [35.0]
    found = speedup(own, plain)
    assert (found.ratio, found.told) == (1.0, False)
    assert str(found) == "not distinguishable from 1x (95 % interval 1.00x to 1.00x)"
    assert sum(plain) / sum(own) > 3.1, "negative control: the plain ratio of sums would have told 3.14x"


def test_planted_fault_stalls_hide_no_speedup_either():
    own, plain = [1.0] * 16, [3.0] * 16
    plain[3] = 90.0
    assert speedup(own, plain) == Speedup(3.0, 3.0, 3.0, 16)
    own[5] = 20.0  # on specrl's side: it counts against it, and the interval says how unsure that is
    assert speedup(own, plain).ratio < 1.5
    assert not speedup(own, plain).told


def test_planted_fault_noise_of_30_percent_claims_a_speedup_in_2_5_percent_of_the_runs():
    for steps in (6, 16, 128):
        runs = [speedup(*noisy(seed, steps, 0.3)) for seed in range(1000)]
        assert sum(run.low > 1.0 for run in runs) <= 40, "25 are due; 40 is 3 standard deviations more"
    assert sum(sum(p) / sum(o) > 1.05 for o, p in (noisy(seed, 16, 0.3) for seed in range(1000))) > 250, "control"


def test_a_true_speedup_is_told():
    pairs = [noisy(seed, 16, 0.3) for seed in range(300)]
    runs = [speedup(own, [2.5 * p for p in plain]) for own, plain in pairs]
    assert all(run.told for run in runs)
    assert sum(run.low < 2.5 < run.high for run in runs) > 0.9 * 300


def test_it_does_not_flatter_where_steps_differ_as_a_median_of_ratios_does():
    rng = random.Random(0)
    plain = [1.0] * 100
    own = [0.3 * rng.lognormvariate(0, 0.6) for _ in plain]
    saved = sum(plain) / sum(own)
    found = speedup(own, plain)
    assert 0.95 * saved < found.ratio <= saved
    assert found.low < saved < found.high
    assert median(p / o for o, p in zip(own, plain, strict=True)) > 1.1 * saved, "negative control"
    assert fmean(p / o for o, p in zip(own, plain, strict=True)) > 1.3 * saved, "negative control"
