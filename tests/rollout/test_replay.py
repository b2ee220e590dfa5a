"""The share of replayed keys: the estimate of the gap, the rule, and where it leads on simulated gaps."""

import json
import math
import random
from statistics import fmean, pstdev

import pytest

from rollout.replay import FIRST, Gap, ReplayControl, next_share, reuse_gap

ROWS, PROMPTS, STEPS = 64, 8, 6


def control_step(share: float, gap: float, rng: random.Random, spread: float = 0.4) -> list[tuple[int, float]]:
    """What a control step finds: each row is replayed with probability `share`; differences have mean `gap`."""
    found = []
    for _ in range(PROMPTS):
        n = sum(rng.random() < share for _ in range(ROWS // PROMPTS))
        if n:
            found.append((n, sum(rng.gauss(gap, spread) for _ in range(n))))
    return found


def simulate(budget: float, gap_at, visits: int = 60, seed: int = 0, control=None) -> list[float]:
    """Shares by visit where a replayed row has the gap `gap_at(share)`."""
    rng, control = random.Random(seed), control or ReplayControl("auto", budget)
    for visit in range(visits):
        share = control.until(visit)[visit]
        for _ in range(STEPS):
            control.observe(control_step(share, gap_at(share), rng))
    return list(control.shares)


def test_gap_and_error_by_hand():
    gap, error = reuse_gap([(2, 1.0), (1, 0.2)])
    assert gap == pytest.approx(0.4)
    assert error == pytest.approx(math.sqrt(2 * ((1.0 - 0.8) ** 2 + (0.2 - 0.4) ** 2)) / 3)
    assert reuse_gap([(2, 1.0)]) == (0.5, math.inf)
    assert math.isnan(reuse_gap([])[0])
    halved = Gap()
    halved.add([(2, 1.0)])
    halved.forget(0.5)
    halved.add([(1, 0.2)])
    assert halved.estimate()[0] == pytest.approx((0.5 + 0.2) / (1 + 1)), "half the weight"


def test_the_error_is_that_of_the_estimate():
    """Where rows of a prompt are alike, the spread over repetitions is as estimated; counting rows says too little."""
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


@pytest.mark.parametrize(
    ("share", "gap", "error", "budget", "expected"),
    [
        (0.25, 0.03, 0.01, 0.02, 0.4),  # 0.02 / (0.03 + 2 * 0.01)
        (0.25, -0.03, 0.01, 0.02, 0.4),  # the sign does not matter
        (0.125, 0.03, 0.01, 0.02, 0.25),  # at most twice the last
        (0.9, 0.3, 0.05, 0.02, 0.05),  # down at once
        (0.25, 0.1, math.inf, 0.02, 0.25),  # nothing is known
        (0.25, math.nan, math.inf, 0.02, 0.25),
        (0.75, 0.0, 0.0, 0.02, 1.0),  # no difference at all
        (0.5, 0.1, 0.1, 0.0, 0.0),
    ],
)
def test_the_rule_by_hand(share, gap, error, budget, expected):
    assert next_share(share, gap, error, budget) == pytest.approx(expected)


@pytest.mark.parametrize("gap", [0.05, -0.1, 0.4])
def test_the_gap_of_a_batch_stays_within_the_budget(gap):
    budget = 0.02
    ends = [simulate(budget, lambda share: gap, seed=seed)[20:] for seed in range(6)]
    assert all(0.5 * budget < fmean(shares) * abs(gap) < budget for shares in ends), "and it is used"
    assert fmean(share * abs(gap) > budget for shares in ends for share in shares) < 0.1


def test_a_gap_that_grows_with_the_share():
    shares = [share for seed in range(5) for share in simulate(0.02, lambda s: 0.2 * s, seed=seed)[20:]]
    assert fmean(share * 0.2 * share for share in shares) <= 0.02
    assert fmean(shares) > 0.1


def test_without_a_gap_everything_is_replayed():
    assert fmean(fmean(simulate(0.04, lambda share: 0.0, seed=seed)[20:]) for seed in range(5)) > 0.9
    assert simulate(0.04, lambda share: 0.0)[-1] == 1.0


@pytest.mark.parametrize("gap", [0.0, 0.3])
def test_without_a_budget_nothing_is(gap):
    assert set(simulate(0.0, lambda share: gap)) == {0.0}


def test_control_a_rule_that_trusts_the_estimate_breaks_the_budget(monkeypatch):
    monkeypatch.setattr("rollout.replay.ERRORS", 0)
    over = [share * 0.05 > 0.02 for seed in range(5) for share in simulate(0.02, lambda s: 0.05, seed=seed)[20:]]
    assert fmean(over) > 0.2


def test_fixed_shares_and_the_first_visits():
    assert ReplayControl(0.5, 0.0).until(2) == [0.5] * 3
    control = ReplayControl("auto", 0.1)
    assert control.until(1) == [0.0, FIRST]
    assert control.until(3) == [0.0, FIRST, FIRST, FIRST], "it stays while nothing is measured"


def test_a_share_is_never_chosen_twice():
    control = ReplayControl("auto", 0.1)
    before = list(control.until(2))
    control.observe([(8, 8.0), (8, 7.0), (8, 9.0)])
    assert control.until(2) == before, "what a visit measured is for the next"
    assert control.until(3)[3] < before[2]


def test_a_restored_control_goes_on_as_the_first():
    whole = simulate(0.02, lambda share: 0.1, visits=12)
    rng, control = random.Random(0), ReplayControl("auto", 0.02)
    for visit in range(12):
        share = control.until(visit)[visit]
        for step in range(STEPS):
            control.observe(control_step(share, 0.1, rng))
            if (visit, step) == (5, 2):
                state = json.loads(json.dumps(control.state()))
                control = ReplayControl("auto", 0.02)
                control.restore(state)
    assert control.shares == whole
