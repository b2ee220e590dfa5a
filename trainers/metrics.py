"""Metrics of an optimiser step, merged over its parts and over all processes of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from transformers import TrainerCallback

from specrl.rollout.reduction import Metric, lowest, merged, seconds

OTHERS = ("sync", "gen", "reward", "drafter", "old_log_prob", "ref_log_prob", "control", "reuse_gap")
"""The parts of a step other than the update, by their names in `timing_s/`; they do not overlap."""


class StepMetrics(TrainerCallback):
    """Collects the metrics of an optimiser step in this process, and times the step, until the step is logged.

    `timing_s/step` is the step's wall clock, control rows included. `timing_s/update` is that time less OTHERS, and the
    minimum over processes, because in the other processes it includes the wait for the slowest one.

    Args:
        exchange: concatenates the lists of all processes; collective.
    """

    def __init__(self, exchange: Callable[[list], list]):
        self._exchange = exchange
        self._noted: dict[str, Metric] = {}
        self._began: float | None = None

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._began = time.perf_counter()

    def note(self, metrics: Mapping[str, Metric]) -> None:
        """Merges the metrics of a part of the step into those of its earlier parts."""
        self._noted = merged([self._noted, metrics], Metric.later)

    def reduced(self) -> dict[str, Metric]:
        """Returns the metrics noted in this step, reduced over all processes, and clears them. Collective."""
        noted, self._noted = self._noted, {}
        if self._began is not None:
            step_s = time.perf_counter() - self._began
            self._began = None
            others_s = sum(noted.get(f"timing_s/{name}", 0.0) for name in OTHERS)
            noted |= {"timing_s/step": seconds(step_s), "timing_s/update": lowest(step_s - others_s)}
        return merged(self._exchange([noted]), Metric.beside)
