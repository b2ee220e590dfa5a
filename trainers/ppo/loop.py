"""A training loop that calls transformers' callbacks as its Trainer does. It is independent of the algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from specrl.rollout.reduction import Metric
from specrl.trainers.callbacks import StepMetrics
from specrl.trainers.checkpoint import writing

PROGRESS = ("global_step", "epoch", "num_input_tokens_seen")


class Loop(ABC):
    """Takes `args.max_steps` steps; logs, saves and stops when the callbacks ask for it.

    Args:
        steps_per_epoch: optimiser steps.
        **parts: arguments of transformers' CallbackHandler: model, processing_class, optimizer, lr_scheduler.
    """

    def __init__(self, args: TrainingArguments, accelerator: Accelerator, steps_per_epoch: int, **parts: Any):
        self.args = args
        self.accelerator = accelerator
        self.steps_per_epoch = steps_per_epoch
        self.control = TrainerControl()
        self.state = TrainerState(
            max_steps=args.max_steps,
            logging_steps=int(args.logging_steps),
            save_steps=int(args.save_steps),
            num_train_epochs=int(args.num_train_epochs),
            is_world_process_zero=accelerator.is_main_process,
            is_local_process_zero=accelerator.is_local_main_process,
        )
        flow = [DefaultFlowCallback, *get_reporting_integration_callbacks(args.report_to)]
        self._step_metrics = StepMetrics()
        self._callbacks = CallbackHandler([*flow, self._step_metrics], **parts)

    @abstractmethod
    def take_step(self) -> dict[str, float]:
        """Takes one optimiser step and returns its metrics, equal in every process; others go through `note`."""

    @abstractmethod
    def save(self, folder: Path, progress: dict[str, Any]) -> None:
        """Writes a checkpoint. Args: progress: the loop's own state, as JSON types."""

    @abstractmethod
    def load(self, folder: Path) -> dict[str, Any]:
        """Restores a checkpoint and returns its `progress`."""

    def add_callback(self, callback: TrainerCallback) -> None:
        self._callbacks.add_callback(callback)

    def note(self, metrics: Mapping[str, Metric]) -> None:
        """Adds metrics to the log of the step; they are reduced over processes."""
        self._step_metrics.note(metrics)

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        """Takes the remaining steps."""
        if resume_from_checkpoint:
            progress = self.load(Path(resume_from_checkpoint))
            for name in PROGRESS:
                setattr(self.state, name, progress[name])
        self._event("on_train_begin")
        while self.state.global_step < self.args.max_steps and not self.control.should_training_stop:
            self._step()
        self._event("on_train_end")

    def _step(self) -> None:
        self._event("on_step_begin")
        logs = self.take_step()
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / self.steps_per_epoch
        self._event("on_step_end")
        logs = logs | self._step_metrics.reduced() | {"epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._event("on_log", logs=logs)
        if self.control.should_save:
            if self.accelerator.is_main_process:
                folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
                with writing(folder):
                    self.save(folder, {name: getattr(self.state, name) for name in PROGRESS})
            self._event("on_save")

    def _event(self, name: str, **details: Any) -> None:
        self.control = getattr(self._callbacks, name)(self.args, self.state, self.control, **details)
