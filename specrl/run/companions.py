"""Monitors and, if configured, trains the draft model of a run."""

from __future__ import annotations

from dataclasses import replace

from accelerate import Accelerator, DistributedType

from specrl.config.schema import Config
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.head import load_drafter
from specrl.rollout.types import RolloutError
from specrl.run.policy import engine_spec
from specrl.trainers.companions import Companion
from specrl.trainers.cotraining.alarm import DrafterAlarm
from specrl.trainers.cotraining.trainer import DrafterTrainer
from specrl.trainers.rollouts import Rollouts


def companions(config: Config, rollouts: Rollouts, accelerator: Accelerator) -> dict[str, Companion]:
    """The drafter's alarm and, if it is trained, its trainer, by name.

    The transformers engine drafts with the very model that is trained. Any other engine drafts with a copy, whose
    weights are updated together with the policy's.

    Raises:
        RolloutError: the drafter cannot be trained.
    """
    drafting = getattr(rollouts.engine, "drafting", None)
    shared = getattr(drafting, "model", None)
    alarm = DrafterAlarm(lambda: shared.dropped) if shared else DrafterAlarm()
    if not config.trainer.drafter.train:
        return {"alarm": alarm}
    if accelerator.distributed_type == DistributedType.FSDP:
        raise RolloutError(
            "trainer.drafter.train=true needs the policy's whole output layer in the first process, and FSDP shards "
            "it. Use trainer.drafter.train=false, or launch with torchrun"
        )
    if shared is None:
        spec = replace(engine_spec(config, frozenset()), device=str(accelerator.device), dtype="float32")
        drafter = rollouts.drafter = load_drafter(spec, rollouts.policy)
    else:
        drafter = shared.model
    options = config.rollout
    sampling = SamplingParams(frozenset(), options.temperature, options.top_k, options.top_p)
    rank = accelerator.process_index if accelerator.num_processes > 1 else None
    trainer = DrafterTrainer(drafter, rollouts.policy, config.trainer.drafter, sampling, seed=config.seed, rank=rank)
    return {"alarm": alarm, "drafter": trainer}
