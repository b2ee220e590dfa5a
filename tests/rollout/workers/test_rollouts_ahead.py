"""Rollouts that were begun ahead: whatever was, and however wrong the prediction, responses are those without it.

The control at the end shows that this comparison detects faults.
"""

import copy
from functools import cache

import pytest
import torch

from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.budget import Budget
from specrl.rollout.keys import Visits, derive_key
from specrl.rollout.metrics import rollout_metrics
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import AheadText, Completion, Request, RolloutBatch, Row
from tests.engines import Spare, local
from tests.rollout.golden import SAMPLING

GROUP, PROMPTS, CAP = 3, 6, 24


@pytest.fixture(scope="module")
def drifting(build_model):
    """drifting(): a model, and weights that move a little further with every version."""
    model = build_model("qwen3", scale=8.0)
    noise = torch.Generator().manual_seed(0)
    steps = [{n: 0.04 * torch.randn(p.shape, generator=noise) * p.std() for n, p in model.named_parameters()}
             for _ in range(5)]  # fmt: skip

    def get():
        mine = copy.deepcopy(model)
        weights = {name: p.detach().clone() for name, p in mine.named_parameters()}
        versions = []
        for step in steps:
            weights = {name: p + step[name] for name, p in weights.items()}
            versions.append(weights)
        return mine, versions

    return get


class Counting:
    """An engine that notes its passes."""

    def __init__(self, engine, passes):
        self.engine, self.passes = engine, passes

    def generate(self, requests):
        done, stats = self.engine.generate(requests)
        self.passes.append(stats.passes)
        return done, stats

    def __getattr__(self, name):
        return getattr(self.engine, name)


def rows_of(step):
    return [
        Row(f"ex-{(2 * step + i) % PROMPTS}", (5, 6, 9 + (2 * step + i) % PROMPTS))
        for i in range(3)
        for _ in range(GROUP)
    ]


def trained(
    drifting, wrap=Spare, replay=0.0, announce=True, wrong=0, settings=(), between=lambda rollout: None, **limits
):
    """Tokens and metrics of five rollouts, each with different weights. Args: wrong: added to announced visits."""
    model, versions = drifting()
    engine = wrap(local(model, SAMPLING, own_weights=True, **{"window": 8, **limits}))
    config = RolloutConfig(max_new_tokens=CAP, group_size=GROUP, replay=replay, **dict(settings))
    rollout = SpeculativeRollout(engine, TrajectoryCache(Fingerprint()), config, seed=3)
    visits, responses, metrics = Visits(), [], []
    for step, weights in enumerate(versions):
        engine.update_weights(weights.items(), step + 1)
        rows = rows_of(step)
        seen = visits.next([row.example_id for row in rows])
        if announce and step + 1 < len(versions):
            coming = rows_of(step + 1)
            known = [visit + wrong for visit in visits.so_far([row.example_id for row in coming])]
            rollout.announce(coming, visit=known, sample_indices=[i % GROUP for i in range(len(coming))])
        batch = rollout.generate(rows, visit=seen, step=step)
        rollout.store(rows, batch, step=step)
        between(rollout)
        responses.append([(c.tokens, c.finish) for c in batch.completions])
        metrics.append(rollout_metrics(batch))
    return responses, metrics


@pytest.fixture(scope="module")
def plainly(drifting):
    """plainly(replay): the responses without."""
    return cache(lambda replay: trained(drifting, lambda engine: engine, replay)[0])


@pytest.mark.slow
@pytest.mark.parametrize(("passes", "replay"), [(3, 0.0), (9, 0.5), (1 << 30, 0.0)])
def test_responses_are_those_of_a_rollout_without(drifting, plainly, passes, replay):
    responses, metrics = trained(drifting, lambda engine: Spare(engine, passes), replay)
    assert responses == plainly(replay)
    assert "spec/ahead_ratio" in metrics[0]
    assert metrics[0]["spec/ahead_ratio"] == 0.0, "there is nothing before the first"
    assert all(line["spec/ahead_ratio"] > 0.05 for line in metrics[1:])
    assert all(line["timing_s/ahead"] > 0 for line in metrics[1:])
    if passes > 99:
        assert all(line["spec/ahead_done_ratio"] == 1 for line in metrics[1:])
        assert all(0 < line["spec/ahead_unchanged_ratio"] < 1 for line in metrics[1:])


@pytest.mark.parametrize(("fill", "replay"), [(10, 0.5), (32, 0.0), (150, 0.5)])
def test_rows_of_the_next_batch_that_join_passes_change_no_response(drifting, plainly, fill, replay):
    responses, metrics = trained(drifting, lambda engine: engine, replay, fill=fill)
    assert responses == plainly(replay)
    assert all(line["spec/ahead_tokens"] > 0 for line in metrics[:-1])
    assert "spec/ahead_tokens" not in metrics[-1], "no batch follows the last"
    assert metrics[0]["spec/ahead_ratio"] == 0.0, "there is nothing before the first"
    assert all(line["timing_s/ahead"] == 0 for line in metrics), "idle workers there are none"
    assert sum(line["spec/ahead_ratio"] for line in metrics[1:]) > 0.3 * (fill > 10)
    if fill == 150:
        assert sum(line["spec/ahead_done_ratio"] for line in metrics[1:]) > 1
        assert any(0 < line["spec/ahead_unchanged_ratio"] < line["spec/ahead_done_ratio"] for line in metrics[1:])


@pytest.mark.parametrize("window", [0, 8])
def test_rows_of_the_next_batch_save_passes_and_cost_the_first_batch_none(drifting, monkeypatch, window):
    """Passes of the engine. By the budget's clock they take the same time, whatever they carry."""
    observe = Budget.observe_pass
    monkeypatch.setattr(Budget, "observe_pass", lambda budget, n, _, *more, **kw: observe(budget, n, 1e-2, *more, **kw))
    monkeypatch.setattr(Budget, "calibrate", lambda *_: None)
    without, filled = [], []
    for fill, passes in ((0, without), (64, filled)):
        trained(drifting, lambda engine, passes=passes: Counting(engine, passes), fill=fill, window=window)
    assert filled[0] <= 1.05 * without[0] + 1, "one is the prefill of those rows"
    assert sum(filled[1:]) < 0.9 * sum(without[1:])


def test_metrics_by_hand(drifting):
    _, (_, line, *_) = trained(drifting, settings={"sources": ()})
    assert line["spec/ahead_ratio"] == line["spec/reused_ahead"]
    model, versions = drifting()
    engine = local(model, SAMPLING, own_weights=True, window=8)
    rows = rows_of(1)
    visit = [1 if row.example_id == "ex-2" else 0 for row in rows]  # the first two batches share one prompt
    keys = [
        derive_key(3, row.example_id, i % GROUP, seen) for i, (row, seen) in enumerate(zip(rows, visit, strict=True))
    ]
    texts = []
    for step in (0, 1):
        engine.update_weights(versions[step].items(), step + 1)
        texts.append(
            [c.tokens for c in engine.generate([Request(r.prompt, k, CAP) for r, k in zip(rows, keys, strict=True)])[0]]
        )
    ahead, came = texts
    assert line["spec/ahead_unchanged_ratio"] == sum(a == b for a, b in zip(ahead, came, strict=True)) / len(rows)
    assert line["spec/ahead_mb"] == 8 * sum(map(len, ahead)) / 2**20
    assert line["timing_s/ahead"] == 0.5


def test_the_seconds_ahead_are_charged_to_one_batch(drifting):
    _, metrics = trained(drifting)
    assert [line["timing_s/ahead"] for line in metrics] == [0, *[0.5] * 4]


def test_rows_that_were_not_begun_count_among_those_that_could_have_been_complete():
    done = [Completion([5, 1], [0.0] * 2, [0.0] * 2, [False] * 2, "stop", version=0, passes=2) for _ in range(2)]
    ahead = [AheadText((5, 1), "stop"), None]
    line = rollout_metrics(RolloutBatch(done, [0, 1], [7, 8], [None] * 2, [False] * 2, ahead=ahead))
    assert line["spec/ahead_done_ratio"] == line["spec/ahead_unchanged_ratio"] == 0.5


@pytest.mark.slow
def test_a_guess_of_other_rows_costs_time_only(drifting, plainly):
    responses, metrics = trained(drifting, wrong=1)
    assert responses == plainly(0.0)
    assert all(line["spec/ahead_ratio"] == 0 for line in metrics)


def test_a_coming_batch_continues_what_there_is_of_it(drifting):
    """Requesting further prompts of a step, as in dynamic sampling, stops the rollout ahead but loses no tokens."""
    engine = Spare(local(drifting()[0], SAMPLING, own_weights=True, window=8), passes=4)
    rollout = SpeculativeRollout(engine, TrajectoryCache(Fingerprint()), RolloutConfig(max_new_tokens=CAP), 3)
    coming, sample_indices = rows_of(1), [i % GROUP for i in range(9)]
    for rows in ([Row("a", (5, 6))], [Row("b", (5, 7))], [Row("c", (5, 8))]):
        rollout.announce(coming, visit=[0] * 9, sample_indices=sample_indices)
        rollout.generate(rows, visit=0, step=0)
    first, second, third = engine.began
    assert all(request.drafter.source != "ahead" for request in first)
    assert any(request.drafter.source == "ahead" for request in second), "what there is of a row is followed"
    assert len(third) <= len(second) <= len(first), "rows that have ended are not begun again"
    assert len(third) < len(first)


def test_an_announcement_is_for_one_call(drifting):
    """Rows that have been rolled out are not started again."""
    engine = Spare(local(drifting()[0], SAMPLING, own_weights=True, window=8), passes=3)
    rollout = SpeculativeRollout(engine, None, RolloutConfig(max_new_tokens=CAP), 3)
    rollout.announce([Row("b", (5, 7))], visit=[0], sample_indices=[0])
    for name in "abc":
        rollout.generate([Row(name, (5, 6))], visit=0, step=0)
    assert len(engine.began) == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"ahead": "off"}, "rollout.ahead=off"),
        ({"acceptance": "off"}, "not off"),
        ({"acceptance": "lenient"}, "not lenient"),
        ({}, "rollout.fill is 0"),
    ],
)
def test_where_nothing_is_rolled_out_ahead_it_says_why(tiny, settings, reason):
    engine = local(tiny("llama"), SAMPLING)
    engine = Spare(engine) if settings else engine
    rollout = SpeculativeRollout(engine, None, RolloutConfig(max_new_tokens=4, **settings), seed=3)
    assert reason in rollout.not_ahead
    rollout.announce([Row("a", (5, 6))], visit=[0], sample_indices=[0])
    batch = rollout.generate([Row("a", (5, 6))], visit=0, step=0)
    assert "spec/ahead_ratio" not in rollout_metrics(batch)


# Control --------------------------------------------------------------------------------------------------------------


class Trusting:
    """An engine whose texts ahead are taken as they are, if they have ended."""

    def __init__(self, engine):
        self.engine = engine

    def generate(self, requests):
        done, stats = self.engine.generate(requests)
        for request, c in zip(requests, done, strict=True):
            text = self.taken.get(request.key) if getattr(request.drafter, "source", "") == "ahead" else None
            if text and text.finish:
                c.tokens, c.finish = list(text.tokens), text.finish
        return done, stats

    def stop(self):
        self.taken, seconds = self.engine.stop()
        return self.taken, seconds

    def __getattr__(self, name):
        return getattr(self.engine, name)


def test_control_texts_that_are_taken_without_being_verified_are_seen(drifting, plainly):
    plain = plainly(0.0)
    assert trained(drifting, lambda engine: Trusting(Spare(engine)))[0] != plain
    assert trained(drifting, Trusting, fill=150)[0] != plain
