"""Metrics of an optimiser step, over its parts and over all processes of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from transformers import TrainerCallback

from specrl.rollout.reduction import Metric, lowest, merged, seconds

OTHERS = ("sync", "gen", "reward", "drafter", "old_log_prob", "ref_log_prob", "control", "reuse_gap")
"""What a step spends its time on besides the update, by its name in `timing_s/`; none is part of another."""


class StepMetrics(TrainerCallback):
    """What a process notes of an optimiser step, and what it took, until the step is logged.

    `timing_s/step` is the step's wall clock, control rows included. `timing_s/update` is what is left of it after
    everything that has a time of its own, OTHERS, in the process where least is left: the others wait for the slowest.

    Args: exchange: turns a list of this process into that of all processes; collective.
    """

    def __init__(self, exchange: Callable[[list], list]):
        self._exchange = exchange
        self._noted: dict[str, Metric] = {}
        self._began: float | None = None

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._began = time.perf_counter()

    def note(self, metrics: Mapping[str, Metric]) -> None:
        """Takes in what a part of the step measured, after what earlier parts did."""
        self._noted = merged([self._noted, metrics], Metric.later)

    def reduced(self) -> dict[str, Metric]:
        """Everything that was noted, over all processes, and forgets it. Every process must call it."""
        noted, self._noted = self._noted, {}
        if self._began is not None:
            step_s = time.perf_counter() - self._began
            self._began = None
            others_s = sum(noted.get(f"timing_s/{name}", 0.0) for name in OTHERS)
            noted |= {"timing_s/step": seconds(step_s), "timing_s/update": lowest(step_s - others_s)}
        return merged(self._exchange([noted]), Metric.beside)
