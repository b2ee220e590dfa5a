"""Callbacks between the trainer and whoever watches it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

if TYPE_CHECKING:
    from trainers.drafter import DrafterTrainer

OTHERS = ("sync", "judge", "gen", "reward", "drafter", "old_log_prob", "ref_log_prob", "control", "reuse_gap")
"""What a step spends its time on besides the update, by its name in `timing_s/`; none is part of another."""


HISTORY = 100  # logs that a trainer's state keeps


class Record(TrainerCallback):
    """Hands one flat record per optimiser step to `write`, then calls `after_step`; `before_training` runs first.

    `timing_s/step` is the step's wall clock, control rows included; `timing_s/update` is what is left of it after
    everything that has a time of its own: OTHERS.
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None],
        after_step: Callable[[int], None],
        before_training: Callable[[], None],
    ):
        self._write, self._after_step, self._before_training = write, after_step, before_training
        self._began = self._step_s = 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == 0:
            self._before_training()

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._step_s = time.perf_counter() - self._began

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs) -> None:
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        record = {"step": state.global_step, "time": time.time(), **logs}
        record["timing_s/step"] = self._step_s
        record["timing_s/update"] = self._step_s - sum(logs.get(f"timing_s/{name}") or 0.0 for name in OTHERS)
        self._write(record)
        self._after_step(state.global_step)


class ShortHistory(TrainerCallback):
    """Keeps the last HISTORY logs of the trainer's state, which else grows, with every checkpoint, for as long as a run
    lasts. metrics.jsonl has them all."""

    def on_log(self, args, state, control, **kwargs) -> None:
        del state.log_history[:-HISTORY]


class CoTraining(TrainerCallback):
    """Co-trains the draft model after each update of the policy and puts its metrics where the trainer logs from."""

    def __init__(self, trainer: DrafterTrainer, metrics: Mapping[str, list[float]]):
        self._trainer, self._metrics = trainer, metrics

    def on_step_end(self, args, state, control, **kwargs) -> None:
        for name, value in self._trainer.step().items():
            self._metrics[name].append(value)


class StopOnTerm(TrainerCallback):
    """On SIGTERM finishes the step, saves a checkpoint and ends training; of several processes any one stops all.

    Args: updates_per_rollout: a checkpoint must not cut a rollout batch in two.
    """

    def __init__(self, updates_per_rollout: int):
        self._updates, self._previous = updates_per_rollout, None
        self.received = False

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._previous = signal.signal(signal.SIGTERM, self._note)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            flag = torch.tensor(int(self.received), device=args.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            self.received = bool(flag)
        if self.received and state.global_step % self._updates == 0:
            control.should_save = control.should_training_stop = True

    def _note(self, *_) -> None:
        self.received = True
