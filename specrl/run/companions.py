"""What is trained beside the policy."""

from __future__ import annotations

from rollout.types import RolloutError
from specrl.config.schema import Config
from trainers.companions import Companion
from trainers.cotraining.trainer import DrafterTrainer
from trainers.rollouts import Rollouts


def companions(config: Config, rollouts: Rollouts, processes: int) -> dict[str, Companion]:
    """What is trained beside the policy, by name. Raises RolloutError where it cannot be."""
    if processes > 1:
        raise RolloutError(
            f"trainer.drafter.train=true works in one process, not in {processes}: their drafters would drift apart. "
            "Use trainer.drafter.train=false, or start one process"
        )
    drafter = getattr(getattr(rollouts.engine, "drafting", None), "model", None)
    if drafter is None:
        raise RolloutError(
            f"trainer.drafter.train=true needs a draft model in this process, which {type(rollouts.engine).__name__} "
            "has not. Use rollout.engine=transformers and cluster.num_workers=0 with rollout.drafter=DIR"
        )
    options, sampling = config.trainer.drafter, rollouts.engine.sampling
    return {"drafter": DrafterTrainer(drafter.model, rollouts.policy, options, sampling, config.seed)}
