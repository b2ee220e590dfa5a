"""Models that are trained next to the policy, and the callback that trains them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from transformers import TrainerCallback

from specrl.rollout.reduction import Metric
from specrl.rollout.types import EngineStats


class Companion(Protocol):
    """A model that is trained next to the policy on its rollouts.

    It observes every rollout, is stepped after each update of the policy, and is part of every checkpoint.
    """

    def observe(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], version: int, stats: EngineStats) -> None:
        """Receives a rollout of weight version `version` as (prompt ids, response ids), before the policy's update."""

    def step(self) -> dict[str, Metric]:
        """Trains after an update of the policy, and returns metrics."""

    def save(self, directory: Path) -> None:
        """Writes the state that `load` restores."""

    def load(self, directory: Path) -> None:
        """Restores the state that `save` wrote. Raises RolloutError."""

    def save_model(self, directory: Path) -> None:
        """Writes the model when the run ends; a companion without weights writes nothing."""


class TrainCompanions(TrainerCallback):
    """Trains companions after each update of the policy; `note` receives their metrics for the step's log."""

    def __init__(self, companions: Mapping[str, Companion], note: Callable[[dict[str, Metric]], None]):
        self._companions, self._note = companions, note

    def on_step_end(self, args, state, control, **kwargs) -> None:
        for companion in self._companions.values():
            self._note(companion.step())
