"""Metrics of a step and their reduction over processes, the record of a step, and the end of training on a signal."""

import signal
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl

from specrl.rollout.reduction import Metric, count, highest, mean, merged, seconds
from specrl.trainers import callbacks
from specrl.trainers.callbacks import OTHERS, Record, StepMetrics, StopOnSignal
from specrl.trainers.correction import measured_weights

PARTS = dict(zip(OTHERS, (0.5, 10.0, 0.0, 2.0, 3.0, 0.375, 1.125, 4.0, 1.0), strict=True))
WITHIN = {"lookup": 1.0, "store": 1.0, "prefill": 1.0, "draft": 1.0, "verify": 1.0, "decode": 1.0, "route": 1.0}


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def step(clock, parts: dict[str, float], took: float) -> dict[str, float]:
    metrics = StepMetrics()
    metrics.on_step_begin(None, None, None)
    metrics.note({f"timing_s/{name}": seconds(spent) for name, spent in parts.items()})
    clock.now += took
    return metrics.reduced()


@pytest.mark.parametrize("left_out", [None, "gen", "control"])
def test_the_update_is_what_no_other_part_took(clock, left_out):
    """Parts of a rollout are in `gen` already and are not subtracted again. An absent part took no time."""
    parts = {key: spent for key, spent in PARTS.items() if key != left_out}
    line = step(clock, parts | WITHIN, 30.0)
    assert line["timing_s/step"] == 30.0
    assert line["timing_s/update"] == 8.0 + PARTS.get(left_out, 0.0)


def test_the_wait_for_the_slowest_process_is_no_update(clock, monkeypatch):
    other = []
    monkeypatch.setattr(callbacks, "gather_object", lambda metrics: other.extend(metrics) or metrics)
    step(clock, {"gen": 3.0, "reward": 1.0}, 5.0)
    monkeypatch.setattr(callbacks, "gather_object", lambda metrics: metrics + other)
    line = step(clock, {"gen": 1.0, "reward": 2.0}, 5.0)
    assert (line["timing_s/gen"], line["timing_s/reward"], line["timing_s/step"]) == (3.0, 2.0, 5.0)
    assert line["timing_s/update"] == 1.0, "5 s less the 4 s of the slow one, not less the 3 + 2 of the two maxima"


def test_notes_of_a_step_are_of_all_its_parts_and_of_no_other_step():
    metrics = StepMetrics()
    metrics.note({"rows": count(2), "gap/mean": mean(1.0, 2), "gap/max": highest(0.5)})
    metrics.note({"rows": count(3), "gap/mean": mean(1.0, 6), "gap/max": highest(0.25)})
    assert metrics.reduced() == {"rows": 5.0, "gap/mean": 0.25, "gap/max": 0.5}
    assert metrics.reduced() == {}


@pytest.mark.parametrize("how", [Metric.later, Metric.beside])
def test_correction_weights_of_parts_are_summed_up_as_those_of_all_rows(how):
    logp = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.25, -4.0], [-0.125, -1.0, -2.0]])
    behaviour = torch.tensor([[-1.2, -1.0, -0.5], [-1.0, -0.5, -2.0], [-1.0, -1.5, -1.0]])
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 0, 0]])

    def measured(rows: slice) -> dict[str, Metric]:
        return measured_weights(logp[rows], behaviour[rows], mask[rows], "token_truncate", 2.0)[1]

    parts = [measured(slice(0, 1)), measured(slice(1, 3))]
    assert len(parts[0]) == 3
    assert merged(parts, how) == pytest.approx(measured(slice(0, 3)))
    for name in parts[0]:
        assert float(measured(slice(0, 3))[name]) != pytest.approx((parts[0][name] + parts[1][name]) / 2), "power"


@pytest.mark.parametrize("first", [True, False])
def test_one_process_writes_and_all_are_called_after_the_step(first):
    written, called = [], []
    record = Record(written.append, called.append, lambda: None)
    state = SimpleNamespace(global_step=3, is_world_process_zero=first)
    record.on_log(None, state, None, {"loss": 0.5, "reward": 1.0})
    record.on_log(None, state, None, {"train_runtime": 7.0})
    assert called == [3], "what is logged at the end of a run is no step"
    assert [(line["step"], line["loss"], line["reward"]) for line in written] == [(3, 0.5, 1.0)] * first


def test_a_signal_ends_training_where_no_rollout_is_cut_in_two():
    stop, args = StopOnSignal(2), SimpleNamespace(device=torch.device("cpu"))
    stop.received = signal.SIGTERM
    ended = []
    for step in (3, 4):
        control = TrainerControl()
        stop.on_step_end(args, SimpleNamespace(global_step=step), control)
        ended.append((control.should_save, control.should_training_stop))
    assert ended == [(False, False), (True, True)]
