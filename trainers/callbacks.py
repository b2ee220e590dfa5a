"""Callbacks between the trainer and whoever watches it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

ECHO_S = 1.0  # within it a launcher such as torchrun passes on the Ctrl-C that its processes had from the terminal
HISTORY = 100  # logs that a trainer's state keeps

Handler = Callable[[int, FrameType | None], Any] | int | None
"""What signal.signal sets and returns."""


class Record(TrainerCallback):
    """Hands one flat record per optimiser step to `write`, then calls `after_step`; `before_training` runs first.

    Of several processes one writes; the rest is called in every process that has this callback.
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None],
        after_step: Callable[[int], None],
        before_training: Callable[[], None],
    ):
        self._write, self._after_step, self._before_training = write, after_step, before_training

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
    """Keeps the last HISTORY logs of the trainer's state, which else grows, with every checkpoint, for as long as a run
    lasts. metrics.jsonl has them all."""

    def on_log(self, args, state, control, **kwargs) -> None:
        del state.log_history[:-HISTORY]


class StopOnSignal(TrainerCallback):
    """On SIGTERM or SIGINT (Ctrl-C) finishes the step, saves a checkpoint and ends training; of several processes any
    one stops all. A second SIGINT raises KeyboardInterrupt at once, with what is saved.

    Signals are noted from the beginning of training to the end of its `with` block. So one that comes while the trained
    model is saved does not end a process that others wait for; `agree` then tells all of them.

    Args: updates_per_rollout: a checkpoint must not cut a rollout batch in two.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, updates_per_rollout: int):
        self._updates = updates_per_rollout
        self._previous: dict[signal.Signals, Handler] = {}
        self._interrupted: float | None = None
        self.received = 0
        """The signal that ended training, 0 for none."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._saved, self._world, self._speaks = state.global_step, args.world_size, state.is_world_process_zero
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
        """The signal that any process has received so far, 0 for none. Every process must call it."""
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
            if self._speaks:  # not by print, which may be what was interrupted
                os.write(2, b"interrupted: finishing the step and saving it; Ctrl-C once more stops at once\n")
        elif self._world == 1 or time.monotonic() - self._interrupted > ECHO_S:
            saved = f"step {self._saved} is saved; resume=auto goes on" if self._saved else "no step is saved"
            raise KeyboardInterrupt(f"interrupted; {saved}")
