"""Effect of rollouts ahead: how much of each batch idle workers generated early, and step times with and without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

from specrl.results.records import RunRecords, mean, number, text, total
from specrl.results.savings import rollouts, step_s

MEASURE = "To measure it: the same run with rollout.ahead=off and another name, and the report with baseline= of that."


@dataclass(frozen=True)
class AheadSteps:
    """Means over all rollouts except the first, which cannot begin ahead. Times exclude control rows."""

    columns: ClassVar = ("seconds a step", "without", "with")

    ratio: float
    """Share of response tokens that were accepted from drafts generated ahead."""
    done: float
    """Share of rows that had been generated to their end before their rollout began."""
    unchanged: float
    """Share of rows that were generated to their end ahead and accepted without a change."""
    own: tuple[float, float]
    """Seconds of a rollout, and of the rest of a step, with rollouts ahead."""
    without: tuple[float, float] | None
    """The same without rollouts ahead; None if they can be neither measured nor estimated."""
    baseline: str = ""
    """The run in which `without` was measured; empty if it is an estimate."""

    @property
    def title(self) -> str:
        return f"Rollouts ahead, without: {f'measured in {self.baseline}' if self.baseline else 'estimated'}"

    def rows(self) -> list[tuple[str, ...]]:
        """Cells of a table with `columns`."""
        if not self.without:
            return []
        parts = zip(("rollout", "rest of the step", "step"), _summed(self.without), _summed(self.own), strict=True)
        return [(name, text(a, 2), text(b, 2)) for name, a, b in parts]

    @property
    def line(self) -> str:
        """A summary in sentences."""
        told = (
            f"Of the tokens {self.ratio:.0%} came from what idle workers had ahead, {self.done:.0%} of the rows had "
            f"ended there, and {self.unchanged:.0%} came out unchanged."
        )
        if self.without:
            told += f" Whole steps {sum(self.without) / sum(self.own):.2f}x."
        return told if self.baseline else f"{told} {MEASURE}"


def ahead(own: RunRecords, baseline: RunRecords | None) -> AheadSteps | None:
    """The effect of rollouts ahead; None if there were none. Args: baseline: used if its rollout.ahead is off."""
    steps = [record for record in rollouts(own.steps) if number(record, "spec/ahead_ratio") is not None][1:]
    if not steps or not step_s(steps):
        return None
    if baseline and baseline.config and baseline.config.rollout.ahead == "off":
        same = {record["step"] for record in steps}
        matched = [record for record in rollouts(baseline.steps) if record["step"] in same]
        without = _parts(matched) if matched else None
        measured_in = str(baseline.path)
    else:
        without = _estimated(own, steps)
        measured_in = ""
    return AheadSteps(
        ratio=mean(steps, "spec/ahead_ratio") or 0.0,
        done=mean(steps, "spec/ahead_done_ratio") or 0.0,
        unchanged=mean(steps, "spec/ahead_unchanged_ratio") or 0.0,
        own=_parts(steps),
        without=without,
        baseline=measured_in,
    )


def _estimated(own: RunRecords, steps: Sequence[dict]) -> tuple[float, float] | None:
    """Estimated seconds of a rollout and of the rest of a step without rollouts ahead; None without control steps.

    A rollout would take the seconds spent ahead per worker, plus the measured rollout scaled by its share of tokens
    that were not generated ahead. Workers that share cores with the trainer are slower while they run ahead, so the
    estimate is at most the plain decoding time of the control steps.
    """
    plain = mean(own.steps, "spec/plain_s")
    if plain is None or own.config is None:
        return None
    left = fmean(total([record], "timing_s/gen") * (1 - total([record], "spec/ahead_ratio")) for record in steps)
    rollout = total(steps, "timing_s/ahead") / len(steps) / max(1, own.config.cluster.num_workers) + left
    return min(plain, rollout), _parts(steps)[1]


def _summed(parts: tuple[float, float]) -> tuple[float, ...]:
    return (*parts, sum(parts))


def _parts(steps: Sequence[dict]) -> tuple[float, float]:
    """Mean seconds of a rollout and of the rest of its step."""
    rollout = total(steps, "timing_s/gen")
    return rollout / len(steps), (step_s(steps) - rollout) / len(steps)
