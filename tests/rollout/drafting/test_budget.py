"""The budget: the fitted costs, and the draft lengths with which rows are fastest."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from specrl.rollout.drafting.budget import Budget, Plan
from specrl.rollout.drafting.cost import SHARE
from specrl.rollout.drafting.drafting import Drafting


def trained(a: float, b: float, rates: dict[str, float], seen: int = 20_000, window: int = 0) -> Budget:
    """A budget that has measured passes of a + b * n seconds and drafts accepted at `rates` per token."""
    budget = Budget(window)
    for n in (1, 64, 256, 512):
        budget.observe_pass(n, a + b * n)
    for state, p in rates.items():
        stood = round(seen * p)
        budget.observe_draft(state, stood, stood)
        for _ in range(seen - stood):
            budget.observe_draft(state, 1, 0)
    return budget


def windows(budget: Budget, kinds) -> list[int]:
    found = budget.plan(kinds).lengths
    return [found[kind] for kind in kinds]


def emitted(p: float, k: int) -> float:
    return sum(p**j for j in range(k + 1))


def seconds(cost, rows: int, p: float, k: int) -> float:
    """Seconds per token of a row that drafts k tokens and pays its share of the passes."""
    a, b = cost
    return (a / rows + b * (1 + k)) / emitted(p, k)


# Cost -----------------------------------------------------------------------------------------------------------------


def test_cost_is_positive_whatever_was_measured():
    for passes in ([], [(1, 0.1)], [(64, 0.1)] * 5, [(1, 0.2), (512, 0.1)], [(1, 1e-6), (512, 0.5)]):
        budget = Budget()
        for n, s in passes:
            budget.observe_pass(n, s)
        a, b = budget.cost()
        assert a > 0, passes
        assert b > 0, passes


def test_calibration_tells_a_from_b_when_all_passes_are_equal():
    calibrated, blind = Budget(), Budget()
    calibrated.calibrate([(1, 4e-3 + 1e-5), (256, 4e-3 + 256e-5)])
    for budget in (calibrated, blind):
        for _ in range(500):
            budget.observe_pass(64, 4e-3 + 64e-5)
    a, b = calibrated.cost()
    assert a == pytest.approx(4e-3, rel=0.02)
    assert b == pytest.approx(1e-5, rel=0.02)
    assert blind.cost()[1] != pytest.approx(1e-5, rel=0.02)  # control


def test_costs_follow_the_passes_without_a_fit_for_each(monkeypatch):
    solve, solved = np.linalg.solve, []
    monkeypatch.setattr("numpy.linalg.solve", lambda *terms: solved.append(terms) or solve(*terms))
    budget = Budget()
    budget.calibrate([(1, 4e-3), (256, 5e-3)])
    for seconds in [4e-3] * 100 + [8e-3] * 200:
        budget.observe_pass(64, seconds)
        a, b = budget.cost()
    assert a + 64 * b == pytest.approx(8e-3, rel=0.1)
    assert len(solved) < 150


PASS_S = 0.1
ROW_S = 2e-3
TOKEN_S = 8e-3
POSITION_S = 1e-5


def pass_s(rows: int, tokens: int, width: float) -> float:
    return PASS_S + ROW_S * rows + (TOKEN_S + POSITION_S * width) * tokens


@pytest.fixture
def timed() -> Budget:
    """A budget that has timed a few passes at the start, as an engine does."""
    drafting = Drafting()
    drafting.attach(SimpleNamespace(vocab=8, context=512, timing=lambda rows, n: (n, pass_s(rows, n, n / rows))))
    return drafting.budget


def test_the_costs_of_rows_tokens_and_positions_are_known_before_the_first_pass(timed):
    assert timed.cost(32, 100) == pytest.approx((PASS_S + 32 * ROW_S, TOKEN_S + 100 * POSITION_S), rel=1e-3)


@pytest.mark.parametrize("plain_passes", [0, 1, 40])
def test_what_a_pass_has_saved_is_known_with_and_without_earlier_passes_that_had_no_drafts(timed, plain_passes):
    rows, width = 8, 1000
    for i in range(plain_passes):
        timed.observe_pass(rows, pass_s(rows, rows, width - i), rows, width - i)
    timed.next_rollout()
    timed.plan([None] * rows, width=width)
    before = timed.account.balance_s
    seconds = pass_s(rows, 2 * rows, width)
    timed.observe_pass(2 * rows, seconds, rows, width, emitted=2 * rows, asking=0.0)
    saved = timed.account.balance_s - before - SHARE * seconds
    assert saved == pytest.approx(pass_s(rows, rows, width) * 2 - PASS_S - seconds, rel=0.05)


# Acceptance -----------------------------------------------------------------------------------------------------------


def test_acceptance_counts_one_rejection_per_draft_and_is_kept_per_state():
    budget = Budget()
    optimistic = budget.acceptance("start")
    assert optimistic > 0.8
    for _ in range(2000):
        budget.observe_draft("diverged", 10, 3)  # 3 accepted, one rejected, 6 not verified
        budget.observe_draft("agreeing", 10, 10)
    assert budget.acceptance("diverged") == pytest.approx(0.75, abs=0.01)
    assert budget.acceptance("agreeing") > 0.99
    assert budget.acceptance("start") == optimistic


# Windows --------------------------------------------------------------------------------------------------------------


SCENES = pytest.mark.parametrize(
    ("a", "b", "rates", "count"),
    [
        (5e-3, 5e-5, {"start": 0.8}, {"start": 16}),
        (5e-3, 5e-5, {"start": 0.5}, {"start": 1}),
        (1e-3, 5e-4, {"start": 0.9}, {"start": 8}),
        (5e-3, 1e-4, {"agreeing": 0.9, "diverged": 0.4}, {"agreeing": 6, "diverged": 10}),
        (2e-2, 1e-4, {"start": 0.6, "agreeing": 0.85, "diverged": 0.2}, {"start": 3, "agreeing": 5, "diverged": 20}),
    ],
)


@SCENES
def test_where_nothing_is_padded_every_kind_has_its_own_best_length(a, b, rates, count):
    found = {}
    for padded in (True, False):
        budget = trained(a, b, rates)
        budget.padded = padded
        cost, p = budget.cost(), {s: budget.acceptance(s) for s in count}
        states = [s for s, n in count.items() for _ in range(n)]
        best = {s: min((seconds(cost, len(states), p[s], k), k) for k in (0, 1, 2, 4, 8, 16, 32, 64)) for s in count}
        plan = budget.plan(states)
        found[padded] = plan.lengths == {s: k for s, (_, k) in best.items()}
    assert found[False]
    assert plan.goodput == pytest.approx(len(states) / sum(count[s] * time for s, (time, _) in best.items()))
    if len(count) > 1:
        assert not found[True], "control: in padded passes they are equal"


@SCENES
def test_the_window_makes_the_rows_fastest(a, b, rates, count):
    """The best power of two for the rows that it makes faster, or the shortest within 5 % of it; none within 10 %."""
    budget = trained(a, b, rates)
    cost, p = budget.cost(), {s: budget.acceptance(s) for s in count}
    states = [s for s, n in count.items() for _ in range(n)]
    chosen = dict(zip(states, windows(budget, states), strict=True))
    each = {s: [seconds(cost, len(states), p[s], k) for k in range(129)] for s in count}

    def total(k):
        return sum(count[s] * each[s][k[s]] for s in count)

    levels = [{s: k if each[s][k] < each[s][0] else 0 for s in count} for k in (0, 1, 2, 4, 8, 16, 32)]
    best = min(map(total, levels))
    assert chosen == next(k for k in levels if (0.95 if any(k.values()) else 0.9) * total(k) <= best)
    assert best < 1.25 * sum(count[s] * min(each[s]) for s in count), "what it may cost where nothing is padded"
    for other in ({s: 4 * k for s, k in chosen.items()}, dict.fromkeys(chosen, 0)):
        if other != chosen:
            assert total(other) > best * (1 + 1e-6)  # control: the minimum is not flat


def test_a_few_rows_that_save_little_do_not_draft_where_they_pad_the_others():
    """They would be ahead of the others, whose attention is padded to theirs until they end."""
    budget = trained(5e-3, 1e-4, {"agreeing": 0.9})
    assert windows(budget, ["agreeing"] + [None] * 31)[0] == 0
    assert windows(budget, ["agreeing"] * 16 + [None] * 16)[0] > 0, "control: they save more"
    budget.padded = False
    assert windows(budget, ["agreeing"] + [None] * 31)[0] > 0, "control: nothing is padded"


@pytest.mark.parametrize(("padded", "needed"), [(True, 0.55), (False, 0.39)])
def test_rows_draft_from_the_acceptance_that_is_said_to_be_needed(padded, needed):
    for p in (0.1, needed - 0.02, needed + 0.02):
        budget = trained(5e-3, 1e-4, {"agreeing": p})
        budget.padded = padded
        plan = budget.plan(["agreeing"] * 32)
        assert (plan.lengths["agreeing"] > 0) == (p > needed)
        if p < needed:
            assert plan.needed == pytest.approx(needed, abs=0.01)


@pytest.mark.parametrize("slowest_leads", [True, False])
def test_the_fixed_time_of_a_pass_is_saved_only_where_the_slowest_row_needs_fewer_passes(slowest_leads):
    budget = trained(8e-3, 1e-3, {"agreeing": 0.9})
    for _ in range(6):
        budget.next_rollout()
        for passes in range(1, 11):
            budget.plan(["agreeing"] * 8)
            budget.observe_pass(16, 24e-3, 8, emitted=15, asking=0.0)
            budget.observe_lead(passes if slowest_leads else 0)
        budget.account.close()
    budget.observe_draft("agreeing", 18_000, 18_000)
    assert (windows(budget, ["agreeing"] * 8)[0] > 0) == slowest_leads


def test_drafting_comes_back_when_drafts_are_good_again():
    budget = trained(5e-3, 1e-4, {"start": 0.001}, seen=2000)
    assert windows(budget, ["start"] * 2) == [0, 0]
    for _ in range(60):
        (k, *_) = windows(budget, ["start"] * 2)
        if k:
            budget.observe_draft("start", k, k)
            budget.observe_draft("start", k, k)
        budget.next_rollout()
    assert windows(budget, ["start"] * 2)[0] > 4


# A draft model --------------------------------------------------------------------------------------------------------


def with_model(a: float, b: float, rates: dict[str, float], promise: float, drafter=(1e-3, 1e-5)) -> Budget:
    """Like `trained`, with a draft model whose passes of n rows cost drafter[0] + drafter[1] * n."""
    budget = trained(a, b, rates)
    budget.drafter.calibrate([(1, sum(drafter)), (128, drafter[0] + 128 * drafter[1])])
    budget.drafter.observe_promise(20_000 * promise, 20_000)
    return budget


def test_the_model_takes_the_rows_that_their_own_drafters_serve_worse():
    rates = {"agreeing": 0.97, "diverged": 0.3}
    states = ["agreeing"] * 4 + ["diverged"] * 4 + [None] * 4
    plan = with_model(5e-3, 1e-5, rates, 0.9).plan(states, model=True)
    assert plan.by_model == {"diverged", None}
    assert plan.lengths["agreeing"] > 0
    assert plan.lengths["diverged"] > 0, "it is carried when the model has no draft"
    assert with_model(5e-3, 1e-5, rates, 0.1).plan(states, model=True).by_model == set(), "a useless model"
    assert with_model(5e-3, 1e-5, rates, 0.9, (2e-2, 1e-3)).plan(states, model=True).by_model == set(), "a slow model"
    assert with_model(5e-3, 1e-5, rates, 0.9).plan(states).by_model == set(), "no model"


@pytest.mark.parametrize("promise", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_the_model_drafts_where_the_best_chain_beats_none(promise, rows):
    fixed, row, (a, b) = 2e-3, 5e-5, (5e-3, 1e-4)
    budget = with_model(a, b, {}, promise, (fixed, row))
    plan, promise = budget.plan([None] * rows, model=True), budget.drafter.promise()

    def rate(k):
        return rows * emitted(promise, k) / (a + b * rows * (1 + k) + k * (fixed + row * rows))

    best = max(range(40), key=rate)
    pays = rate(best) > 1.1 * rate(0)
    assert plan.goodput == pytest.approx(rate(best if pays else 0), rel=1e-2)
    assert bool(plan.by_model) is pays
    assert bool(budget.chain([1] * rows, plan).active) is pays


def test_a_chain_stops_each_row_where_its_own_confidence_ends():
    budget = with_model(5e-3, 5e-5, {}, 0.9)
    chain = budget.chain([1] * 3, Plan({}, frozenset({None}), goodput=500.0, token_s=5e-5))
    assert chain.active == [0, 1, 2]
    sure, unsure = math.log(0.999), math.log(0.01)
    for _ in range(1000):
        budget.drafter.observe_chain([unsure], 0)

    assert chain.step([sure, unsure, math.nan], [9, 9, 9]) == [0], "neither is worth verifying"
    assert chain.active == [0]
    for _ in range(8):
        assert chain.step([sure], [9, 9, 9]) == [0]
    assert chain.active == [], "there is room for nine"
    assert chain.logprobs == [[sure] * 9, [], []]


def test_confidence_is_what_became_of_equally_confident_tokens():
    budget = Budget()
    for _ in range(500):
        budget.drafter.observe_chain([math.log(0.975), math.log(0.975), math.log(0.6)], 2)  # 0.6 is never accepted
        budget.drafter.observe_chain([math.log(0.2), math.log(0.975)], 0)  # tokens after a rejection were not verified
    assert budget.drafter.confidence(math.log(0.975)) > 0.98
    assert budget.drafter.confidence(math.log(0.6)) < 0.05
    assert budget.drafter.confidence(math.log(0.2)) < 0.05
    assert budget.drafter.confidence(0.0) > 0.99, "unseen: the model's own word"
    for _ in range(24):
        budget.next_rollout()
    assert budget.drafter.confidence(math.log(0.6)) > 0.5, "a bad spell is forgotten"


def test_a_model_that_does_not_pay_is_tried_again_after_some_rollouts():
    budget = with_model(5e-3, 1e-4, {}, 0.01)
    going = []
    for _ in range(40):
        chain = budget.chain([1] * 50, budget.plan([None] * 50, model=True))
        going.append(bool(chain.active))
        budget.next_rollout()
    assert not any(going[:3]), "not at once"
    assert going[-1]


# Sources and pauses ---------------------------------------------------------------------------------------------------


def test_a_bad_source_stops_drafting_while_a_good_one_goes_on():
    good, bad = ("diverged", "earlier"), ("diverged", "group")
    budget = trained(5e-3, 1e-4, {good: 0.9, bad: 0.02})
    plans = [budget.plan([good, bad, None]).lengths for _ in range(64)]
    assert all(plan[good] >= 4 for plan in plans)
    assert {plan[bad] for plan in plans} == {plan[None] for plan in plans} == {0}
    blurred = trained(5e-3, 1e-4, {"diverged": 0.02})  # control: a shared estimate would stop the good source too
    assert set(windows(blurred, ["diverged"] * 3)) == {0}


def test_tokens_that_attend_to_more_cost_more():
    """A long draft costs more late in a response than at its start."""
    rng, budget, blind = random.Random(0), Budget(), Budget()
    for _ in range(60):
        rows, width, k = rng.randint(2, 64), rng.randint(20, 200), rng.choice([1, 3, 5, 9])
        seconds = 5e-3 + 1e-4 * rows + (2e-5 + 2e-7 * width) * rows * k
        budget.observe_pass(rows * k, seconds, rows, width)
        blind.observe_pass(rows * k, seconds, rows)
    for width in (20, 200):
        assert budget.cost(64, width) == pytest.approx((5e-3 + 64e-4, 2e-5 + 2e-7 * width), rel=0.05)
    assert blind.cost(64)[1] > 1.5 * budget.cost(64, 20)[1]  # control

    budget.observe_draft("agreeing", 1000, 900)
    early, late = (budget.plan(["agreeing"] * 64, width=width).lengths["agreeing"] for width in (20, 200))
    assert early > late > 0
