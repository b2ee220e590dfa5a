"""What the life of a run (specrl/train.py) asks of a trainer; GRPO's is TRL's, PPO's is our own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainerCallback, TrainerState

    from rollout.engines.base import Engine
    from trainers.collector import LastRollout
    from trainers.drafter import DrafterTrainer
    from trainers.judge_refit import JudgeRefit
    from trainers.stage import RolloutStage


class Trainer(Protocol):
    """Drives transformers' callbacks: the life of a run hangs its records, checkpoints and signals on them."""

    accelerator: Accelerator
    state: TrainerState
    engine: Engine
    stage: RolloutStage
    cotraining: DrafterTrainer | None
    refit: JudgeRefit | None

    def add_callback(self, callback: TrainerCallback) -> None:
        """Calls it from now on."""

    def train(self, resume_from_checkpoint: str | None = None) -> object:
        """All steps of the run that are left, from a checkpoint directory when one is given."""

    def save_model(self, output_dir: str) -> None:
        """Writes the policy; every process must call it."""

    def sync_engine(self) -> None:
        """Brings the engine to the current weights; costs nothing when it has them."""

    def last_rollout(self) -> LastRollout:
        """What was generated last; call it after a step."""
