"""The trainers' options as arguments of transformers and TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from specrl.rollout.config import RolloutConfig
from specrl.rollout.types import RolloutError
from specrl.trainers.config import TrainerConfig


def passes(trainer: TrainerConfig, rollout: RolloutConfig, world: int) -> tuple[int, int]:
    """Returns (rows per process and forward/backward pass, passes per optimiser step).

    Raises:
        RolloutError: the rows of a step cannot be divided over `world` processes.
    """
    rows = trainer.prompts_per_step * rollout.group_size // trainer.minibatches
    per_pass = trainer.rows_per_pass or max(rows // world, 1)
    count = rows // (per_pass * world)
    if count * per_pass * world != rows:
        share = rows // world if rows % world == 0 else 0
        fits = max((n for n in range(1, share + 1) if share % n == 0 and n <= per_pass), default=0)
        raise RolloutError(
            f"{rows} rows per step cannot be split over {world} processes of {per_pass} rows per pass. "
            + (f"Use trainer.rows_per_pass={fits}" if fits else f"Use a number of processes that divides {rows}")
            + ", or another trainer.prompts_per_step"
        )
    return per_pass, count


def common_arguments(
    trainer: TrainerConfig,
    rollout: RolloutConfig,
    *,
    output_dir: Path,
    seed: int,
    cpu: bool,
    world: int,
    trackers: list[str],
) -> dict[str, Any]:
    """The keyword arguments of transformers.TrainingArguments that GRPO and PPO runs share.

    Args:
        output_dir: the run's `checkpoints` directory.
        world: number of processes.
        trackers: names of the transformers integrations to log to; their packages are installed.
    """
    per_pass, count = passes(trainer, rollout, world)
    return {
        "per_device_train_batch_size": per_pass,
        "gradient_accumulation_steps": count,
        "output_dir": str(output_dir),
        "learning_rate": trainer.learning_rate,
        "lr_scheduler_type": trainer.lr_schedule,
        "warmup_steps": trainer.warmup_steps,
        "num_train_epochs": trainer.epochs,
        "max_steps": trainer.max_steps or -1,
        "max_grad_norm": trainer.max_grad_norm,
        "weight_decay": trainer.weight_decay,
        "bf16": trainer.precision != "fp32",
        "use_cpu": cpu,
        "gradient_checkpointing": trainer.gradient_checkpointing,
        "save_strategy": "steps",
        "save_steps": trainer.save_every or 10**9,  # the last step is always saved
        "save_total_limit": None,  # CompleteCheckpoint removes old checkpoints once the new one is complete
        "logging_steps": 1,
        "report_to": trackers or "none",
        "run_name": output_dir.parent.name,  # the name of the run's directory
        "project": "specrl",
        "disable_tqdm": True,
        "seed": seed,
    }


def ppo_arguments(trainer: TrainerConfig, rollout: RolloutConfig, steps: int, **run: Any) -> TrainingArguments:
    """TrainingArguments for a PPO run of `steps` optimiser steps. See common_arguments for `run`."""
    return TrainingArguments(**common_arguments(trainer, rollout, **run) | {"max_steps": steps})
