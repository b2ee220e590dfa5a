"""The estimator of every speedup: by hand, under stalled and noisy clocks, and against estimators that flatter."""

import random
from statistics import fmean, median, stdev

import pytest

from specrl.results.speedup import Flips, bounded, flips, half_width, speedup


def noisy(seed: int, steps: int, spread: float) -> tuple[list[float], list[float]]:
    """Own and plain seconds of steps that take 1 s either way, each clock off by `spread`."""
    rng = random.Random(seed)
    specrl, plain = ([rng.lognormvariate(0, spread) for _ in range(steps)] for _ in "ab")
    return specrl, plain


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
    result = speedup([1.0] * 6, [1.0, 3.0, 3.0, 3.0, 3.0, 9.0])
    half = 2.571 * (2 / 3) ** 0.5 * 6**0.5 / 6 * 6 / 5
    assert result.ratio == pytest.approx(16 / 6)
    assert (result.low, result.high) == pytest.approx((16 / 6 - half, 16 / 6 + half), rel=1e-3)
    assert result.is_significant
    assert str(result) == "2.67x (95 % interval 1.64x to 3.69x)"


def test_steps_that_are_alike_are_no_independent_sample():
    """Runs that drift apart and together again (AR(1) 0.9), without a difference on average: the interval has 0."""
    generator = random.Random(0)
    excluded = {"blocks": 0, "steps": 0}
    for _ in range(500):
        series = [generator.gauss(0, 1)]
        for _ in range(119):
            series.append(0.9 * series[-1] + generator.gauss(0, 0.19**0.5))
        mean = fmean(series)
        excluded["blocks"] += abs(mean) > half_width([value - mean for value in series]) / len(series)
        excluded["steps"] += abs(mean) > 1.98 * stdev(series) / len(series) ** 0.5  # the planted fault
    assert excluded["blocks"] < 0.15 * 500
    assert excluded["steps"] > 0.6 * 500


def test_independent_steps_have_an_interval_of_95_percent():
    generator = random.Random(1)
    excluded = 0
    for _ in range(1000):
        series = [generator.gauss(0, 1) for _ in range(32)]
        mean = fmean(series)
        excluded += abs(mean) > half_width([value - mean for value in series]) / len(series)
    assert 0.03 * 1000 < excluded < 0.07 * 1000


def test_few_steps_claim_nothing():
    result = speedup([1.0] * 5, [9.0] * 5)
    assert (result.ratio, result.low, result.is_significant) == (9.0, None, False)
    assert "5 of the 6 steps" in str(result)
    assert speedup([1.0] * 6, [9.0] * 6).is_significant
    assert speedup([], []) is None


def test_planted_fault_a_stalled_step_claims_nothing():
    specrl, plain = [1.0] * 16, [1.0] * 15 + [35.0]
    result = speedup(specrl, plain)
    assert (result.ratio, result.is_significant) == (1.0, False)
    assert str(result) == "not distinguishable from 1x (95 % interval 1.00x to 1.00x)"
    assert sum(plain) / sum(specrl) > 3.1, "negative control: the plain ratio of sums would have been 3.14x"


def test_planted_fault_noise_of_30_percent_claims_a_speedup_in_2_5_percent_of_the_runs():
    for steps in (6, 16, 128):
        runs = [speedup(*noisy(seed, steps, 0.3)) for seed in range(1000)]
        assert sum(run.low > 1.0 for run in runs) <= 40, "25 are due; 40 is 3 standard deviations more"
    assert sum(sum(p) / sum(o) > 1.05 for o, p in (noisy(seed, 16, 0.3) for seed in range(1000))) > 250, "control"


def test_a_true_speedup_is_significant():
    pairs = [noisy(seed, 16, 0.3) for seed in range(300)]
    runs = [speedup(specrl, [2.5 * p for p in plain]) for specrl, plain in pairs]
    assert all(run.is_significant for run in runs)
    assert sum(run.low < 2.5 < run.high for run in runs) > 0.9 * 300


def test_it_does_not_flatter_where_steps_differ_as_a_median_of_ratios_does():
    rng = random.Random(0)
    plain = [1.0] * 100
    specrl = [0.3 * rng.lognormvariate(0, 0.6) for _ in plain]
    saved = sum(plain) / sum(specrl)
    result = speedup(specrl, plain)
    assert 0.95 * saved < result.ratio <= saved
    assert result.low < saved < result.high
    assert median(p / o for o, p in zip(specrl, plain, strict=True)) > 1.1 * saved, "negative control"
    assert fmean(p / o for o, p in zip(specrl, plain, strict=True)) > 1.3 * saved, "negative control"


FLIPS = [
    {"spec/control_mismatches": 0, "spec/compared_tokens": 400},
    {"reward": 1.0},
    {"spec/control_mismatches": 1, "spec/compared_tokens": 350, "spec/flip_position": 40.0},
    {"spec/control_mismatches": 3, "spec/compared_tokens": 250, "spec/flip_position": 20.0},
]


def test_flips_by_hand():
    assert flips(FLIPS) == Flips(4, 1000, (40 + 3 * 20) / 4)
    assert flips(FLIPS[:1]) == Flips(0, 400, 0.0)
    assert flips(FLIPS[1:2]) is None, "no control step"
    assert flips(FLIPS).sentence("bfloat16").startswith("in bfloat16 4 of 1,000 tokens differ")
    assert flips(FLIPS[:1]).sentence().startswith("none of 400 tokens differs")
    with pytest.raises(KeyError):
        flips([{"spec/control_mismatches": 1, "spec/compared_tokens": 9}])
