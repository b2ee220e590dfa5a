"""What the life of a run (specrl/train.py) asks of a trainer, TRL's GRPO or our PPO, and what both share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from trainers.callbacks import CoTraining
from trainers.collector import Collector, Setup
from trainers.refill import Scored

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerState

    from rollout.engines.base import Engine
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

    def last_rollout(self) -> Scored:
        """What was generated last; call it after a step."""


class Rollouts:
    """The half of a Trainer that its rollouts give it."""

    def _open_rollouts(
        self: Trainer,
        setup: Setup,
        policy: Callable[[], torch.nn.Module],
        rows: Sequence[dict],
        tokenizer: PreTrainedTokenizerBase,
        metrics: dict[str, list[float]],
    ) -> None:
        """Makes engine and collector, once accelerator, state and policy exist.

        Args:
            setup: of the run.
            policy: gives the model as it is trained, adapters included, not wrapped for several processes.
            rows: of the dataset.
            tokenizer: decodes responses.
            metrics: takes those of co-training, which runs after a step.
        """
        self.engine = setup.make_engine(policy())
        self.collector = Collector(self.engine, setup, self.accelerator, policy, lambda: self.state, tokenizer, rows)
        self.stage, self.cotraining = self.collector.stage, self.collector.cotraining
        self.refit = self.collector.refit
        if self.cotraining:
            self.add_callback(CoTraining(self.cotraining, metrics))

    def sync_engine(self) -> None:
        """See Trainer."""
        self.collector.sync()

    def last_rollout(self) -> Scored:
        """See Trainer."""
        return self.collector.last
