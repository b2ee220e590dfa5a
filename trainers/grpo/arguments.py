"""The trainers' options as arguments of transformers and TRL."""

from __future__ import annotations

from pathlib import Path

from trl import GRPOConfig

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


def grpo_config(
    trainer: TrainerConfig,
    rollout: RolloutConfig,
    *,
    output_dir: Path,
    seed: int,
    cpu: bool,
    world: int,
    trackers: list[str],
) -> GRPOConfig:
    """TRL's GRPOConfig for rollout batches of prompts_per_step * group_size rows, of every algorithm.

    Args:
        output_dir: the run's `checkpoints` directory.
        world: number of processes.
        trackers: names of the transformers integrations to log to; their packages are installed.
    """
    per_pass, count = passes(trainer, rollout, world)
    low, high = trainer.clip_range
    ppo = trainer.algorithm == "ppo"
    loss = trainer.algorithm if trainer.loss == "auto" else trainer.loss
    config = GRPOConfig(
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=count,
        steps_per_generation=count * trainer.minibatches,
        num_iterations=trainer.updates_per_rollout,
        # TRL refuses groups of 1, which a critic allows
        num_generations=rollout.group_size if rollout.group_size > 1 else trainer.prompts_per_step,
        output_dir=str(output_dir),
        learning_rate=trainer.learning_rate,
        lr_scheduler_type=trainer.lr_schedule,
        warmup_steps=trainer.warmup_steps,
        num_train_epochs=trainer.epochs,
        max_steps=trainer.max_steps or -1,
        max_grad_norm=trainer.max_grad_norm,
        weight_decay=trainer.weight_decay,
        bf16=trainer.precision != "fp32",
        use_cpu=cpu,
        gradient_checkpointing=trainer.gradient_checkpointing,
        save_strategy="steps",
        save_steps=trainer.save_every or 10**9,  # the last step is always saved
        save_total_limit=None,  # CompleteCheckpoint removes old checkpoints once the new one is complete
        logging_steps=1,
        report_to=trackers or "none",
        run_name=output_dir.parent.name,  # the name of the run's directory
        project="specrl",
        disable_tqdm=True,
        seed=seed,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        importance_sampling_level=trainer.ratio,
        epsilon=low,
        epsilon_high=high,
        beta=trainer.beta,
        entropy_coef=trainer.entropy_bonus,
        loss_type="dapo" if ppo else loss,  # every token weighs the same
        scale_rewards=trainer.scale_rewards,
        mask_truncated_completions=trainer.mask_truncated and not ppo,  # PPO's baselines need the masked rows' values
    )
    config.num_generations = rollout.group_size
    return config
