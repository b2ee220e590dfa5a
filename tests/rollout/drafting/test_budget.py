"""The budget: the fitted costs, and the draft lengths with which rows are fastest."""

import math
import random
from collections import deque
from functools import partial
from itertools import pairwise

import pytest

from specrl.rollout.drafting.budget import Budget, Plan
from specrl.rollout.drafting.draft import EMPTY
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.response import Response
from specrl.rollout.types import Request


class Fixed:
    """A drafter with a constant proposal."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens

    def propose(self, tokens, limit):
        return self.tokens[:limit]


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


def test_old_passes_are_forgotten():
    budget = Budget()
    for _ in range(200):
        budget.observe_pass(10, 1.0)
        budget.observe_pass(500, 2.0)
    for _ in range(400):
        budget.observe_pass(10, 1e-3 + 1e-5 * 10)
        budget.observe_pass(500, 1e-3 + 1e-5 * 500)
    a, b = budget.cost()
    assert a == pytest.approx(1e-3, rel=0.05)
    assert b == pytest.approx(1e-5, rel=0.05)


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


def test_a_fixed_window_is_obeyed():
    budget = trained(1e-3, 1e-5, {"start": 0.01}, window=7)
    assert windows(budget, ["start", "diverged", "agreeing"]) == [7, 7, 7]
    assert windows(budget, []) == []


def test_long_drafts_when_nearly_all_is_accepted_and_few_rows_are_left():
    budget = trained(5e-3, 1e-5, {"start": 0.999})
    (k,) = windows(budget, ["start"])
    assert k > 100
    (short,) = windows(trained(5e-3, 1e-5, {"start": 0.7}), ["start"])
    assert 0 < short < 30


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
    """The best power of two for the rows that it makes faster, or the shortest within 5 % of it."""
    budget = trained(a, b, rates)
    cost, p = budget.cost(), {s: budget.acceptance(s) for s in count}
    states = [s for s, n in count.items() for _ in range(n)]
    chosen = dict(zip(states, windows(budget, states), strict=True))
    each = {s: [seconds(cost, len(states), p[s], k) for k in range(129)] for s in count}

    drafting = [s for s in count if min(each[s]) < each[s][0]]

    def total(k):
        return sum(count[s] * each[s][k[s]] for s in drafting)

    levels = [{s: k if each[s][k] < each[s][0] else 0 for s in count} for k in (1, 2, 4, 8, 16, 32)]
    best = min(map(total, levels))
    assert chosen == next(k for k in levels if 0.95 * total(k) <= best)
    assert best < 1.25 * sum(count[s] * min(each[s]) for s in drafting), "what it may cost where nothing is padded"
    for other in ({s: 4 * k for s, k in chosen.items()}, dict.fromkeys(chosen, 0)):
        if other != chosen:
            assert total(other) > best * (1 + 1e-6)  # control: the minimum is not flat


def test_a_guess_that_is_not_carried_is_judged_by_what_was_emitted():
    budget, row = trained(1e-3, 1e-3, {("start", "custom"): 0.001}), Response(Request([1], 0, 9, Fixed([5, 6, 7])))
    drafting = Drafting(budget)
    drafting.vocab = 10
    before = budget.acceptance(("agreeing", "custom"))
    for _ in range(3):
        drafting.guess(row, 3)
        assert budget.plan([row.bucket] * 8).lengths[row.bucket] == 0, "nothing is carried"
        drafting.learn(row, EMPTY, [5], 0)
        assert row.state == "agreeing"
    assert budget.acceptance(("agreeing", "custom")) > before
    row.guess = EMPTY
    drafting.learn(row, EMPTY, [9], 0)
    assert row.state == "agreeing", "nobody was asked"


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


def test_rows_that_go_well_do_not_take_the_model_from_those_that_do_not():
    """The slow rows set the time. The many tokens of the other rows must not make a second seem too expensive."""
    budget = with_model(5e-3, 1e-5, {"agreeing": 0.99, "diverged": 0.3}, 0.9)
    few, many, most = (budget.plan(["agreeing"] * n + ["diverged"] * 8, model=True) for n in (0, 16, 40))
    assert few.by_model == many.by_model == {"diverged"}
    assert many.goodput < few.goodput
    assert budget.chain([1] * 8, many).active == list(range(8))
    assert most.by_model == set(), "all would wait for passes that few rows need"


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


def test_a_row_joins_when_a_chain_brings_in_what_catching_up_costs():
    budget = with_model(5e-3, 1e-5, {}, 0.8, (1e-3, 2e-5))
    plan = budget.plan([None] * 6, model=True)
    assert budget.chain([1] * 5 + [40], plan).active == [0, 1, 2, 3, 4, 5]
    assert budget.chain([1] * 5 + [400], plan).active == [0, 1, 2, 3, 4]


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


def test_a_fixed_window_is_obeyed_by_the_model_too():
    budget = with_model(5e-3, 1e-3, {}, 0.01)
    budget.window = 3
    plan = budget.plan([None, "start"], model=True)
    chain = budget.chain([1] * 2, plan)
    for left in (2, 1, 0):
        assert chain.step([math.log(0.01)] * 2, [9, 9]) == [0, 1]
        assert bool(chain.active) is bool(left)


# Sources and pauses ---------------------------------------------------------------------------------------------------


def test_a_bad_source_stops_drafting_while_a_good_one_goes_on():
    good, bad = ("diverged", "earlier"), ("diverged", "group")
    budget = trained(5e-3, 1e-4, {good: 0.9, bad: 0.02})
    plans = [budget.plan([good, bad, None]).lengths for _ in range(64)]
    assert all(plan[good] > 4 for plan in plans)
    assert {plan[bad] for plan in plans} == {plan[None] for plan in plans} == {0}
    blurred = trained(5e-3, 1e-4, {"diverged": 0.02})  # control: a shared estimate would stop the good source too
    assert set(windows(blurred, ["diverged"] * 3)) == {0}


def test_what_is_needed_is_where_a_token_pays():
    for p, carried in ((0.4, True), (0.35, False)):
        budget = trained(5e-3, 1e-3, {"start": p})
        plan = budget.plan(["start"] * 3)  # without drafts a second is worth 3 tokens / 8 ms; a token costs 1 ms
        assert bool(plan.lengths["start"]) is carried is (budget.acceptance("start") > plan.needed)
    assert plan.needed == pytest.approx(3 / 8, rel=0.02)


def test_no_window_is_longer_than_what_is_asked_for():
    rng = random.Random(3)
    for _ in range(200):
        kinds = ["start", "agreeing", "diverged", "lost"]
        rates = {kind: rng.choice([0.01, 0.5, 0.9, 0.99, 0.9999]) for kind in kinds}
        budget = trained(rng.choice([1e-3, 2e-2]), rng.choice([1e-5, 1e-3]), rates)
        rows = [rng.choice([*kinds, None]) for _ in range(rng.choice([1, 8, 64]))]
        assert max(windows(budget, rows)) <= budget.longest(len(rows))
    assert Budget(7).longest(3) == 7


def test_useless_drafts_are_not_believed_again_under_another_name():
    budget = Budget()
    unseen = budget.acceptance(("lost", "position"))
    for _ in range(32):
        budget.observe_draft(("start", "prefix"), 20, 0)
    assert budget.acceptance(("lost", "position")) < 0.25 < unseen
    for _ in range(32):
        budget.observe_draft(("start", "prefix"), 1000, 1000)
    assert budget.acceptance(("lost", "position")) == unseen, "good drafts of one kind promise nothing more of another"


def test_rests_are_short_and_end_where_something_rides():
    budget, asked = Budget(), []
    for i in range(70):
        if budget.skipping_plan() is None:
            asked.append(i)
            budget.observe_asking(drafted=False)
    assert asked == [0, 4, 20, 52]
    while budget.skipping_plan():
        pass
    budget.observe_asking(drafted=True)
    assert budget.skipping_plan() is None
    fixed = Budget(4)
    fixed.observe_asking(drafted=False)
    assert fixed.skipping_plan() is None, "a fixed window is obeyed in every pass"


def asked(passes: int, brings: float, asking: float, rows: int = 64, cohorts: int = 1, model: bool = False):
    """Passes whose drafters are called, if drafts add `brings` tokens a row and the calls take `asking` passes.

    Args:
        cohorts: concurrent passes, each with different rows.
        model: vLLM's draft model drafts for every pass, also where no drafter is called.
    """
    kind, plain, found, flights = ("agreeing", "group"), 0.02, [], deque()
    budget = trained(0.5 * plain, 0.5 * plain / rows, {kind: 0.9})
    for i in range(passes):
        if len(flights) == cohorts:
            flights.popleft()()
        resting = budget.skipping_plan()
        if resting is None:
            found.append(i)
            assert budget.plan([kind] * rows).lengths[kind], "by acceptances alone they pay"
            budget.observe_asking(drafted=True)
        if resting:
            flights.append(partial(budget.observe_pass, rows * (1 + model), plain, rows, 100, rows))
        else:
            passed = 2 * rows, 1.5 * plain, rows, 100, brings * rows
            flights.append(partial(budget.observe_pass, *passed, asking=asking * plain))
    return found


@pytest.mark.parametrize(("brings", "asking"), [(1.4, 0.0), (1.0, 0.1), (1.55, 0.2)])
def test_drafts_that_do_not_pay_together_rest_however_good_they_look(brings, asking):
    """Passes with drafts take 1.5 times as long. Only the tokens per second count, with the time of the drafters."""
    rested = asked(400, brings, asking)
    assert len(rested) < 400 / 32 + 10
    assert [b - a for a, b in pairwise(rested)][-8:] == [32] * 8


def test_two_cohorts_rest_and_draft_as_one_does():
    """With one shared variable for the calls' seconds, one cohort's passes were never evaluated and it kept drafting at
    a loss, while the other stopped although drafts paid.
    """
    assert len(asked(400, brings=1.0, asking=0.0, cohorts=2)) < 400 / 32 + 12
    assert len(asked(400, brings=2.0, asking=0.0, cohorts=2)) > 395


@pytest.mark.parametrize(
    ("brings", "asking", "model"), [(1.8, 0.0, False), (1.95, 0.2, False), (1.8, 0.0, True), (2.2, 0.2, True)]
)
def test_drafts_that_pay_are_asked_for_in_every_pass_but_one(brings, asking, model):
    """One early pass without them is the baseline of the comparison, also if a draft model drafts for it."""
    found = asked(400, brings, asking, model=model)
    (plain,) = set(range(400)) - set(found)
    assert plain < 8


def test_few_rows_are_judged_anew():
    """Drafts that lose time at 64 rows may save time later. After each halving some passes with drafts are timed."""
    budget = Budget()
    for rows, rests in ((64, True), (33, True), (32, False)):
        budget.plan([("agreeing", "group")] * rows)
        for _ in range(20 if rests else 1):
            budget.observe_asking(drafted=True)
            budget.observe_pass(2 * rows, 1.0, rows, 10, emitted=rows, asking=1.0)
        budget.observe_asking(drafted=True)
        assert (budget.skipping_plan() is not None) is rests


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


def test_further_passes_of_a_split_one_are_no_plain_passes():
    """They have drafts without another call of the drafters, so neither side of the comparison counts their seconds."""
    budget = Budget()
    budget.plan([("agreeing", "group")] * 8)
    worth = 8 * budget.cost(8)[0]

    def rests():
        budget.observe_asking(drafted=True)
        return budget.skipping_plan() is not None

    for _ in range(8):
        budget.observe_pass(16, worth, 8, emitted=14, asking=0.1 * worth)
        budget.observe_pass(8, worth, 8, emitted=8)
    assert not rests()
    for _ in range(8):
        budget.observe_pass(16, 0.01 * worth, 8, emitted=80, further=True)
    assert not rests(), "what would make plain passes look fast is left out"
    for _ in range(8):
        budget.observe_pass(8, 0.01 * worth, 8, emitted=80)
    assert rests(), "power: of plain passes the same decides"
