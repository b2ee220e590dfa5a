"""Reduction of metrics: every metric of a rollout over calls and over processes with unequal loads equals that of a
batch of all rows.
"""

import copy
import math

import pytest

from specrl.rollout.metrics import lossy_metrics, rollout_metrics
from specrl.rollout.reduction import (
    BESIDE,
    LATER,
    Metric,
    count,
    highest,
    lowest,
    mean,
    merged,
    shared,
)
from specrl.rollout.types import AheadText, Completion, EngineStats, RolloutBatch


def batch(rows: int, step: float) -> RolloutBatch:
    """rows + 1 rows of increasing lengths, with costs that are multiples of `step`; those of two steps all differ."""
    done = []
    for i in range(rows + 1):
        n = 2 + i * 3
        reused = [t % 3 != i % 3 for t in range(n)]
        logprobs = [-0.25 * step * (t + 1) for t in range(n)]
        behaviour = [logprob - 0.125 * (i + 1) for logprob in logprobs]
        done.append(Completion(list(range(n)), logprobs, behaviour, reused, "stop", 0, passes=n - sum(reused) + i))
    texts = [AheadText(tuple(done[i].tokens[: 4 + i]), "stop" if i % 2 == 0 else None) for i in range(rows)]
    accepted = rows + 3
    stats = EngineStats(
        prefill_s=1 * step,
        verify_s=2 * step,
        decode_s=3 * step,
        draft_s=4 * step,
        tried_s=8 * step,
        forward_tokens=round(50 * step),
        drafted=5 * rows + 7,
        accepted=accepted,
        sources={"prefix": (3 * rows + 1, accepted - 2), "group": (2 * rows + 1, 1), "ahead": (3 + rows, 1)},
        paused=2 * rows + 1,
        paused_acceptance=0.25 * rows,
        paused_needed=rows,
        route_s=5 * step,
        steps=6 * rows,
        escalated=rows + 1,
        route_faults=rows - 1,
        ties=rows,
    )
    n = rows + 1
    return RolloutBatch(
        done,
        sample_indices=list(range(n)),
        keys=list(range(n)),
        ages=[*range(1, n), None],
        replayed=[False] * n,
        unchanged=[i % 4 == 0 for i in range(n)],
        ahead=[*texts, None],
        stats=stats,
        ahead_s=7 * step,
        lookup_s=8 * step,
        store_s=9 * step,
        total_s=10 * step,
    )


SMALL, LARGE = batch(2, 3.0), batch(7, 1.0)  # the smaller batch takes longer


def metrics_of(one: RolloutBatch) -> dict[str, Metric]:
    return rollout_metrics(one) | lossy_metrics(one)


NAMES = sorted(metrics_of(SMALL))


def test_all_metrics_of_a_rollout_are_walked():
    assert NAMES == sorted(metrics_of(LARGE)) == sorted(metrics_of(SMALL + LARGE))
    assert len(NAMES) >= 36
    assert all(math.isfinite(value) for value in metrics_of(SMALL).values())


def test_what_comes_later_in_a_step_counts_as_if_it_had_been_one_batch():
    small, large, whole = (metrics_of(one) for one in (SMALL, LARGE, SMALL + LARGE))
    assert {name: float(small[name].later(large[name])) for name in NAMES} == pytest.approx(whole)


def test_processes_count_as_one_batch_whose_seconds_are_the_slowest_one_s():
    whole = SMALL + LARGE
    for part in ("prefill_s", "verify_s", "decode_s", "draft_s", "tried_s", "route_s"):
        setattr(whole.stats, part, getattr(SMALL.stats, part))
    whole.lookup_s, whole.store_s, whole.total_s = SMALL.lookup_s, SMALL.store_s, SMALL.total_s
    small, large = metrics_of(SMALL), metrics_of(LARGE)
    together = {name: float(large[name].beside(small[name])) for name in NAMES}
    assert together == pytest.approx(metrics_of(whole))
    alike = [name for name in NAMES if together[name] == pytest.approx((large[name] + small[name]) / 2)]
    assert alike == [], "power: a mean over processes would be seen"


def test_extremes_and_what_all_know():
    assert (highest(2.0).beside(highest(3.0)), highest(3.0).later(highest(2.0))) == (3.0, 3.0)
    assert (lowest(2.0).beside(lowest(3.0)), lowest(3.0).later(lowest(2.0))) == (2.0, 2.0)
    assert (shared(2.0).beside(shared(2.0)), shared(2.0).later(shared(5.0))) == (2.0, 5.0)


def test_a_part_that_lacks_a_metric_changes_nothing_of_it():
    parts = [{"a": count(1)}, {"a": count(2), "b": mean(3, 4)}, {}]
    assert merged(parts, Metric.beside) == {"a": 3.0, "b": 0.75}
    assert merged([{"a": shared(2.0)}, {"a": shared(5.0)}], Metric.later) == {"a": 5.0}, "in the order of the parts"
    assert math.isnan(mean(0, 0))
    assert mean(0, 0).beside(mean(1, 2)) == 0.5, "nothing scored here, and half of two there"


def test_a_metric_is_a_number_that_survives_being_sent():
    sent = copy.copy(mean(3, 4))  # with the protocol by which processes exchange objects
    assert (sent + 1, f"{sent:.2f}", sent.beside(mean(1, 4))) == (1.75, "0.75", 0.5)
    assert LATER.keys() == BESIDE.keys()
