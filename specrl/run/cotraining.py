"""Trains the draft model of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specrl.config.schema import Config
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.head import load_drafter
from specrl.run.policy import engine_spec
from specrl.trainers.cotraining.trainer import DrafterTrainer, TrainDrafter

if TYPE_CHECKING:
    from specrl.trainers.grpo.trainer import GRPOTrainerWithReuse


def train_drafter(config: Config, trainer: GRPOTrainerWithReuse) -> None:
    """Trains `rollout.drafter` next to the policy.

    The transformers engine drafts with the very model that is trained. Any other engine drafts with a copy, whose
    weights are updated together with the policy's.

    Raises:
        RolloutError: the drafter cannot be trained.
    """
    rollouts = trainer.rollouts
    accelerator = trainer.accelerator
    drafting = getattr(rollouts.engine, "drafting", None)
    shared = getattr(drafting, "model", None)
    if shared is None:
        spec = replace(engine_spec(config, frozenset()), device=str(accelerator.device), dtype="float32")
        drafter = rollouts.drafter = load_drafter(spec, rollouts.policy)
    else:
        drafter = shared.model
    options = config.rollout
    sampling = SamplingParams(frozenset(), options.temperature, options.top_k, options.top_p)
    rollouts.drafter_trainer = DrafterTrainer(
        drafter,
        rollouts.policy,
        config.trainer.drafter,
        sampling,
        seed=config.seed,
        processes=accelerator.num_processes,
    )
    trainer.add_callback(TrainDrafter(rollouts.drafter_trainer, trainer.note))
