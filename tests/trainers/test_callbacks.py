"""What a step's record says of time, by a scripted clock."""

import time
from types import SimpleNamespace

import pytest

from trainers.callbacks import Record

STATE = SimpleNamespace(global_step=3, is_world_process_zero=True)
PARTS = {
    **{"gen": 10.0, "reward": 2.0, "control": 4.0, "reuse_gap": 1.0, "drafter": 3.0, "sync": 0.5},
    **{"old_log_prob": 0.375, "ref_log_prob": 1.125},
}
WITHIN = {"lookup": 1.0, "store": 1.0, "prefill": 1.0, "draft": 1.0, "verify": 1.0, "decode": 1.0, "route": 1.0}


@pytest.mark.parametrize("left_out", [None, *PARTS])
def test_the_update_is_what_no_other_part_took(monkeypatch, left_out):
    """Parts of a rollout are in `gen` already, so they are not taken off again; a part that is absent took nothing."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    written = []
    record = Record(written.append, lambda step: None, lambda: None)
    record.on_step_begin(None, STATE, None)
    clock.now += 30.0
    record.on_step_end(None, STATE, None)
    clock.now += 50.0  # such as a checkpoint: no part of the step
    parts = {key: seconds for key, seconds in PARTS.items() if key != left_out}
    record.on_log(None, STATE, None, {"loss": 0.5, **{f"timing_s/{k}": s for k, s in (parts | WITHIN).items()}})
    (line,) = written
    assert line["timing_s/step"] == 30.0
    assert line["timing_s/update"] == 8.0 + PARTS.get(left_out, 0.0)
