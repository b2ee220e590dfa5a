"""Control steps with a scripted rollout: when they run, what they compare, and every metric by hand."""

import math
import random
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev

import pytest

from specrl.rollout.config import RolloutConfig
from specrl.rollout.control import Control, reuse_gap
from specrl.rollout.metrics import rollout_metrics
from specrl.rollout.types import Completion, EngineStats, RolloutBatch, RolloutError, Row

ROWS = [Row("a", (5,)), Row("a", (5,)), Row("b", (6,)), Row("b", (6,))]


def completion(tokens, reused=None, passes=1, finish="length") -> Completion:
    n = len(tokens)
    return Completion(list(tokens), [-0.5] * n, [-0.5] * n, reused or [False] * n, finish, 0, passes)


@dataclass
class FakeRollout:
    """Returns scripted texts and seconds, and records the requests."""

    config: RolloutConfig
    fresh_texts: list = field(default_factory=list)
    plain_texts: list | None = None
    plain_s: float = 6.0
    calls: list = field(default_factory=list)

    def generate(self, rows, *, visit, step, sample_indices, domain="rollout"):
        self.calls.append((domain, [r.example_id for r in rows], sample_indices, visit, step))
        done = [completion(t) for t in self.fresh_texts[: len(rows)]]
        return RolloutBatch(
            done, list(sample_indices), [0] * len(rows), [None] * len(rows), [False] * len(rows), total_s=1.5
        )

    def plain(self, rows, keys):
        self.calls.append(("plain", [r.example_id for r in rows], list(keys)))
        done = [completion(self.plain_texts[key - 70]) for key in keys]
        n = len(rows)
        return RolloutBatch(done, [0] * n, list(keys), [None] * n, [False] * n, total_s=self.plain_s)


TEXTS = [[10, 11, 12], [13], [14, 15], [16, 17, 18, 19]]


def batch_of(texts=TEXTS, **settings) -> RolloutBatch:
    done = [completion(t) for t in texts]
    base = RolloutBatch(done, [0, 1, 0, 1], [70, 71, 72, 73], [None] * 4, [False] * 4, visits=[1] * 4, total_s=2.0)
    return replace(base, **settings)


def made(score=None, strict=True, fresh_texts=(), plain_texts=TEXTS, exchange=list, **config):
    rollout = FakeRollout(RolloutConfig(**{"measure_every": 1, **config}), list(fresh_texts), plain_texts)
    return Control(rollout, score or (lambda rows, texts: [0.0] * len(rows)), exchange, strict=strict), rollout


def measure(control, batch=None, rewards=(1.0, 0.0, 1.0, 0.0), step=2):
    return control(ROWS, batch or batch_of(), list(rewards), step=step)


# Control steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "due"),
    [
        ({"measure_every": 3}, [2, 5, 8]),
        ({"measure_every": 1}, list(range(9))),
        ({"measure_every": 0}, []),
        ({"measure_every": 3, "acceptance": "lenient"}, []),  # lenient text differs from plain decoding by design
        ({"measure_every": 3, "acceptance": "off"}, []),
    ],
)
def test_control_steps_run_when_they_are_due(config, due):
    control, rollout = made(**config)
    measured = [step for step in range(9) if "spec/speedup" in measure(control, step=step)]
    assert measured == due
    assert [c[0] for c in rollout.calls] == ["plain"] * len(due)
    assert all(c == ("plain", ["a", "a", "b", "b"], [70, 71, 72, 73]) for c in rollout.calls), "the same rows and keys"


def test_speedup_is_plain_time_over_the_whole_stage():
    metrics = measure(made()[0], batch_of(total_s=2.0))
    assert metrics["spec/speedup"] == 3.0
    assert metrics["spec/plain_s"] == metrics["timing_s/control"] == 6.0
    assert metrics["spec/control_mismatches"] == 0


def test_control_rows_are_decoded_in_the_calls_that_drew_them():
    control, rollout = made()
    metrics = measure(control, batch_of(calls=[3, 0, 1]))
    assert rollout.calls == [("plain", ["a", "a", "b"], [70, 71, 72]), ("plain", ["b"], [73])], "none of no rows"
    assert metrics["spec/plain_s"] == 12.0, "one after the other"
    assert metrics["spec/control_mismatches"] == 0


OTHER = [TEXTS[0], TEXTS[1], [14, 99], [16, 17, 18]]


def test_a_mismatch_stops_a_strict_run_and_names_the_row():
    with pytest.raises(RolloutError, match=r"2 of 4 .*example 'b', sample 0"):
        measure(made(plain_texts=OTHER)[0])
    with pytest.raises(RolloutError, match=r"1 of 4 .*example 'b', sample 1, from token 3 on"):
        measure(made(plain_texts=[*TEXTS[:3], OTHER[3]])[0])


def test_a_mismatch_is_counted_otherwise():
    metrics = measure(made(plain_texts=OTHER, strict=False)[0])
    assert metrics["spec/control_mismatches"] == 2
    assert metrics["spec/speedup"] == 3.0
    assert metrics["spec/compared_tokens"] == 3 + 1 + 2 + 4, "of the last row the end of one text counts as a token"
    assert metrics["spec/flips_per_1k"] == 1000 * 2 / 10
    assert metrics["spec/flip_position"] == (1 + 3) / 2


# The reuse gap --------------------------------------------------------------------------------------------------------


def test_reuse_gap_by_hand_leaves_failed_rewards_out():
    seen = []

    def score(rows, texts):
        seen.append(([r.example_id for r in rows], texts))
        return [0.25, None]

    control, rollout = made(score, fresh_texts=[[1], [2], [3]], replay=0.5)
    replayed = batch_of(replayed=[True, False, True, True], visits=[4, 4, 3, 3])
    metrics = measure(control, replayed, rewards=(1.0, 0.0, 0.5, None), step=5)
    # replayed rows with a reward: 0 and 2; only the first one's control row was scored
    assert rollout.calls[-1] == ("control", ["a", "b"], [0, 0], [4, 3], 5)
    assert seen == [(["a", "b"], [[1], [2]])]
    assert metrics["spec/reuse_gap"] == pytest.approx(1.0 - 0.25)
    assert metrics["spec/reuse_gap_error"] == math.inf, "one prompt says nothing about others"
    assert metrics["timing_s/reuse_gap"] == 1.5

    control, _ = made(lambda rows, texts: [0.25, 1.0, 0.5], fresh_texts=[[1], [2], [3]], replay=0.5)
    metrics = measure(control, replayed, rewards=(1.0, 0.0, 0.5, 0.75), step=5)
    gap = ((1.0 - 0.25) + (0.5 - 1.0) + (0.75 - 0.5)) / 3
    assert metrics["spec/reuse_gap"] == pytest.approx(gap)
    # prompt a has one row, prompt b two; 2 / (2 - 1) is the factor of two clusters
    squares = (0.75 - gap) ** 2 + (-0.25 - 2 * gap) ** 2
    assert metrics["spec/reuse_gap_error"] == pytest.approx((2 * squares) ** 0.5 / 3)


def test_processes_exchange_even_without_replayed_rows():
    """The exchange is collective, so a process that skipped it would block the others."""
    calls = []

    def exchange(found):
        calls.append(found)
        return [(1, 0.5), (1, 0.25)]

    control, _ = made(replay=0.5, exchange=exchange)
    metrics = measure(control, batch_of())
    assert calls == [[]]
    assert metrics["spec/reuse_gap"] == 0.375


def test_a_resumed_run_measures_at_the_same_steps():
    first, _ = made(measure_every=3)
    measure(first)
    again, _ = made(measure_every=3)
    again.rollouts = first.rollouts
    assert ["spec/speedup" in measure(again, step=step) for step in range(1, 6)] == [False, True, False, False, True]


def test_no_reuse_gap_without_replayed_rows():
    control, rollout = made(replay=0.5)
    assert "spec/reuse_gap" not in measure(control, batch_of())
    assert "spec/reuse_gap" not in measure(control, batch_of(replayed=[True] * 4), rewards=[None] * 4)
    waiting, _ = made(replay=0.5, measure_every=2)
    assert "spec/reuse_gap" not in measure(waiting, batch_of(replayed=[True] * 4)), "not due"
    control, _ = made(replay=0.0)
    assert "spec/reuse_gap" not in measure(control, batch_of(replayed=[True] * 4))
    assert {c[0] for c in rollout.calls} == {"plain"}


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


# Every metric of a batch, by hand -------------------------------------------------------------------------------------


def test_rollout_metrics_by_hand():
    done = [
        completion([10, 11, 12], [True, True, True], passes=1, finish="stop"),
        completion([13], [False], passes=1),
        completion([14, 15], [True, False], passes=2),
        completion([16, 17, 18, 19], [True, False, False, True], passes=4),
    ]
    stats = EngineStats(
        prefill_s=0.1,
        verify_s=0.2,
        decode_s=0.3,
        draft_s=0.05,
        tried_s=0.04,
        passes=4,
        forward_tokens=25,
        drafted=8,
        accepted=6,
        sources={"prefix": (5, 5), "group": (3, 1)},
        paused=2,
        paused_acceptance=0.3,
        paused_needed=1.0,
        ties=2,
    )
    batch = RolloutBatch(
        done,
        sample_indices=[0, 1, 0, 1],
        keys=[1, 2, 3, 4],
        ages=[12, None, 4, 2],
        replayed=[False] * 4,
        unchanged=[True, False, True, False],
        stats=stats,
        lookup_s=0.01,
        store_s=0.02,
        total_s=2.5,
    )
    assert rollout_metrics(batch) == pytest.approx(
        {
            "timing_s/gen": 2.5,
            "timing_s/lookup": 0.01,
            "timing_s/store": 0.02,
            "timing_s/prefill": 0.1,
            "timing_s/draft": 0.05,
            "timing_s/verify": 0.2,
            "timing_s/decode": 0.3,
            "spec/hit_rate": 0.75,
            "spec/reused_ratio": 0.6,
            "spec/full_reuse_ratio": 0.5,
            "spec/reused_tokens": 6,
            "spec/new_tokens": 4,
            "spec/passes_per_row": 2.0,
            "spec/passes_max": 4,
            "spec/forward_tokens": 25,
            "spec/ties": 2,
            "spec/tried_s": 0.04,
            "perf/throughput": 4.0,
            "spec/draft_age": 6.0,
            "spec/draft_acceptance_rate": 0.75,
            "spec/acceptance_prefix": 1.0,
            "spec/reused_prefix": 0.5,
            "spec/acceptance_group": 1 / 3,
            "spec/reused_group": 0.1,
            "spec/paused_ratio": 0.25,
            "spec/paused_acceptance": 0.15,
            "spec/paused_needed": 0.5,
        }
    )


def test_a_batch_without_rows_has_no_metrics():
    with pytest.raises(RolloutError, match="a rollout of no rows has no metrics"):
        rollout_metrics(RolloutBatch([], [], [], [], []))


def test_metrics_without_any_draft_leave_age_and_rate_out():
    metrics = rollout_metrics(batch_of())
    assert metrics["spec/hit_rate"] == metrics["spec/reused_ratio"] == metrics["spec/full_reuse_ratio"] == 0
    assert metrics["spec/new_tokens"] == 10
    assert "spec/draft_age" not in metrics
    assert "spec/draft_acceptance_rate" not in metrics
    assert metrics["spec/paused_ratio"] == 0
    assert "spec/paused_needed" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())
