"""What is trained or watched beside the policy."""

from __future__ import annotations

from dataclasses import replace

from accelerate import Accelerator, DistributedType

from specrl.config.schema import Config
from specrl.rollout.drafter import load_drafter
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.types import RolloutError
from specrl.run.policy import engine_spec
from specrl.trainers.companions import Companion
from specrl.trainers.cotraining.alarm import DrafterAlarm
from specrl.trainers.cotraining.trainer import DrafterTrainer
from specrl.trainers.rollouts import Rollouts


def companions(config: Config, rollouts: Rollouts, accelerator: Accelerator) -> dict[str, Companion]:
    """What goes along with a run that has a drafter, by name: its alarm, and where it is trained, its trainer.

    Raises:
        RolloutError: it cannot be trained.
    """
    shared = getattr(getattr(rollouts.engine, "drafting", None), "model", None)
    found: dict[str, Companion] = {"alarm": DrafterAlarm(lambda: shared.dropped) if shared else DrafterAlarm()}
    if config.trainer.drafter.train:
        found["drafter"] = _trained(config, rollouts, accelerator)
    return found


def _trained(config: Config, rollouts: Rollouts, accelerator: Accelerator) -> Companion:
    """The trainer of the drafter.

    The transformers engine drafts with what is trained; an engine elsewhere has a copy of it, which gets new weights
    with the policy's.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        raise RolloutError(
            "trainer.drafter.train=true has the first process ask the policy's output layer what the drafter should "
            "have drafted, and FSDP leaves no process the whole of it. Use trainer.drafter.train=false, or launch with "
            "torchrun"
        )
    r = config.rollout
    shared = getattr(getattr(rollouts.engine, "drafting", None), "model", None)
    if shared is None:
        spec = replace(engine_spec(config, frozenset()), device=str(accelerator.device), dtype="float32")
        drafter = rollouts.drafter = load_drafter(spec, rollouts.policy)
    else:
        drafter = shared.model
    sampling = SamplingParams(frozenset(), r.temperature, r.top_k, r.top_p)
    rank = accelerator.process_index if accelerator.num_processes > 1 else None
    return DrafterTrainer(drafter, rollouts.policy, config.trainer.drafter, sampling, seed=config.seed, rank=rank)
