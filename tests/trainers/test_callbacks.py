"""The content of a run's record of a step, and the process that writes it."""

import signal
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl

from specrl.trainers.callbacks import Record, StopOnSignal


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
