"""Trainer callbacks that collect and record metrics, bound the log history and stop training on a signal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from specrl.rollout.reduction import Metric, lowest, merged, seconds

ECHO_S = 1.0  # a launcher such as torchrun repeats the terminal's Ctrl-C to its processes within this time
HISTORY = 100  # log entries that the trainer's state keeps

OTHERS = ("sync", "gen", "tools", "reward", "drafter", "old_log_prob", "ref_log_prob", "control", "reuse_gap")
"""The parts of a step other than the update, by their names in `timing_s/`; they do not overlap."""

Handler = Callable[[int, FrameType | None], Any] | int | None
"""A signal handler as signal.signal accepts and returns it."""


class StepMetrics(TrainerCallback):
    """Collects the metrics of an optimiser step in this process, and times the step, until the step is logged.

    `timing_s/step` is the step's wall clock, control rows included. `timing_s/update` is that time less OTHERS, and the
    minimum over processes, because in the other processes it includes the wait for the slowest one.
    """

    def __init__(self) -> None:
        self._noted: dict[str, Metric] = {}
        self._began: float | None = None

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._began = time.perf_counter()

    def note(self, metrics: Mapping[str, Metric]) -> None:
        """Merges the metrics of a part of the step into those of its earlier parts."""
        self._noted = merged([self._noted, metrics], Metric.later)

    def reduced(self) -> dict[str, Metric]:
        """Returns the metrics noted in this step, reduced over all processes, and clears them. Collective."""
        noted = self._noted
        self._noted = {}
        if self._began is not None:
            step_s = time.perf_counter() - self._began
            self._began = None
            others_s = sum(noted.get(f"timing_s/{name}", 0.0) for name in OTHERS)
            noted |= {"timing_s/step": seconds(step_s), "timing_s/update": lowest(step_s - others_s)}
        return merged(gather_object([noted]), Metric.beside)


class Record(TrainerCallback):
    """Passes one flat record per optimiser step to `write`, then calls `after_step`.

    `before_training` is called before the first step, but not when a run resumes. Only the main process writes; every
    process that has this callback calls `before_training` and `after_step`.
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None],
        after_step: Callable[[int], None],
        before_training: Callable[[], None],
    ):
        self._write = write
        self._after_step = after_step
        self._before_training = before_training

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == 0:
            self._before_training()

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs) -> None:
        if not logs or "loss" not in logs:
            return
        if state.is_world_process_zero:
            self._write({"step": state.global_step, "time": time.time(), **logs})
        self._after_step(state.global_step)


class ShortHistory(TrainerCallback):
    """Keeps only the last HISTORY entries of the trainer's log history; metrics.jsonl has all of them.

    The history is part of every checkpoint and would otherwise grow for as long as the run lasts.
    """

    def on_log(self, args, state, control, **kwargs) -> None:
        del state.log_history[:-HISTORY]


class StopOnSignal(TrainerCallback):
    """On SIGTERM or SIGINT (Ctrl-C), finishes the step, saves a checkpoint and ends training.

    A signal to any process stops all of them. A second SIGINT raises KeyboardInterrupt immediately; its message names
    the last saved step.

    Signals are recorded from the start of training until the `with` block exits. A signal that arrives while the
    trained model is being saved therefore does not end a process that others wait for; `agree` passes it on to them.

    Args:
        updates_per_rollout: optimiser steps per rollout batch. Training ends only at a multiple of it, because a run
            cannot resume in the middle of a batch.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, updates_per_rollout: int):
        self._updates = updates_per_rollout
        self._previous: dict[signal.Signals, Handler] = {}
        self._interrupted: float | None = None
        self.received = 0
        """The number of the signal that ended training, 0 if there was none."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._saved = state.global_step
        self._world = args.world_size
        self._is_main = state.is_world_process_zero
        self._previous = {number: signal.signal(number, self._note) for number in self.SIGNALS}

    def __enter__(self) -> StopOnSignal:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.agree(args.device) and state.global_step % self._updates == 0:
            control.should_save = control.should_training_stop = True

    def agree(self, device: torch.device) -> int:
        """The number of the signal that any process has received so far, 0 for none. Every process must call it."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            flag = torch.tensor(self.received, device=device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            self.received = int(flag)
        return self.received

    def on_save(self, args, state, control, **kwargs) -> None:
        self._saved = state.global_step

    def _note(self, number: int, _) -> None:
        self.received = max(self.received, int(number))
        if number != signal.SIGINT:
            return
        if self._interrupted is None:
            self._interrupted = time.monotonic()
            if self._is_main:  # not print, because the signal may have interrupted one
                os.write(2, b"interrupted: finishing the step and saving it; Ctrl-C once more stops at once\n")
        elif self._world == 1 or time.monotonic() - self._interrupted > ECHO_S:
            saved = f"step {self._saved} is saved; resume=auto goes on" if self._saved else "no step is saved"
            raise KeyboardInterrupt(f"interrupted; {saved}")
