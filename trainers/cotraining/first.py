"""Co-training where several processes train the policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import distributed

from specrl.rollout.reduction import Metric
from specrl.rollout.types import EngineStats
from specrl.trainers.cotraining.trainer import DrafterTrainer


class RankZeroTrainer:
    """The first process trains the drafter on its own rollouts, the others take over its weights after each step.

    Args:
        trainer: of this process; all begin with the same drafter.
        rank: of this process.
    """

    def __init__(self, trainer: DrafterTrainer, rank: int):
        self.trainer, self._trains = trainer, rank == 0

    def observe(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], version: int, stats: EngineStats) -> None:
        """See Companion, as of the four that follow."""
        if self._trains:
            self.trainer.observe(rows, version, stats)

    def step(self) -> dict[str, Metric]:
        """All processes must call it."""
        metrics = self.trainer.step() if self._trains else {}
        for weight in self.trainer.drafter.parameters():
            distributed.broadcast(weight.detach(), 0)
        return metrics

    def save(self, directory: Path) -> None:
        self.trainer.save(directory)

    def load(self, directory: Path) -> None:
        self.trainer.load(directory)

    def save_model(self, directory: Path) -> None:
        self.trainer.save_model(directory)
