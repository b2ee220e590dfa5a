"""What a run's record of a step consists of, and who writes it."""

from types import SimpleNamespace

import pytest

from trainers.callbacks import Record


@pytest.mark.parametrize("first", [True, False])
def test_one_process_writes_and_all_are_called_after_the_step(first):
    written, called = [], []
    record = Record(written.append, called.append, lambda: None)
    state = SimpleNamespace(global_step=3, is_world_process_zero=first)
    record.on_log(None, state, None, {"loss": 0.5, "reward": 1.0})
    record.on_log(None, state, None, {"train_runtime": 7.0})
    assert called == [3], "what is logged at the end of a run is no step"
    assert [(line["step"], line["loss"], line["reward"]) for line in written] == [(3, 0.5, 1.0)] * first
