"""What is trained beside the policy, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from transformers import TrainerCallback

from specrl.rollout.reduction import Metric
from specrl.rollout.types import EngineStats


class Companion(Protocol):
    """What is trained beside the policy, on its rollouts: it sees each, has a step after each of the policy's, and is
    part of every checkpoint."""

    def observe(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], version: int, stats: EngineStats) -> None:
        """A rollout by weight version `version`, as (prompt ids, response ids), before the policy learns from it."""

    def step(self) -> dict[str, Metric]:
        """Learns, after an update of the policy, and returns metrics."""

    def save(self, directory: Path) -> None:
        """Writes what `load` takes."""

    def load(self, directory: Path) -> None:
        """Goes on from what `save` wrote. Raises RolloutError."""

    def save_model(self, directory: Path) -> None:
        """Writes what the run leaves behind."""


class TrainCompanions(TrainerCallback):
    """Trains companions after each update of the policy; `note` takes their metrics into the step's log."""

    def __init__(self, companions: Mapping[str, Companion], note: Callable[[dict[str, Metric]], None]):
        self._companions, self._note = companions, note

    def on_step_end(self, args, state, control, **kwargs) -> None:
        for companion in self._companions.values():
            self._note(companion.step())
