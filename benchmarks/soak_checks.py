"""The checks of a soak, as pure functions that return the violations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BOUNDS = {
    "rss_mb": (30.0, 3.0),
    "workers_mb": (10.0, 3.0),
    "files": (8.0, 0.0),
    "threads": (4.0, 0.0),  # of which a resumed process loads its weights with some, for a moment
    "processes": (1.0, 0.0),
    "checkpoint_mb": (0.1, 0.02),
}
"""A run may grow by a + b * steps / 100 after its warm-up, by the fitted line; a disturbed one may exceed the peak of a
quiet one by a."""
WARM_UP = 0.25
"""Share of the steps in which caches fill and allocators settle."""
COSTS = (
    "timing_s/",
    "spec/",
    "control/",
    "cache/",
    "perf/",
    "sampling/",
    "reference/",
    "reward/reused_ratio",
    "step_time",
    "time",
)
"""Columns with the costs of a step, which may differ."""


@dataclass(frozen=True)
class Sample:
    """One look at a run."""

    step: int
    rss_mb: float
    """Memory of the driver."""
    workers_mb: float
    """Memory of its reward and rollout workers together."""
    files: int
    """Open file descriptors of the driver."""
    threads: int
    processes: int
    """The driver and all its descendants."""
    disk_mb: float
    """The run directory."""
    checkpoint_mb: float
    """The newest complete checkpoint."""


def growth(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(least-squares rise over the steps after the warm-up, number of those steps) of (step, value) points."""
    first, last = points[0][0], points[-1][0]
    x, y = np.array([point for point in points if point[0] >= first + WARM_UP * (last - first)], float).T
    return float(np.polyfit(x, y, 1)[0] * (x[-1] - x[0])), float(x[-1] - x[0])


def grown(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """(growth, most that BOUNDS allow) of every bounded series of one process.

    It counts from the first checkpoint to the last step but one, after which a process gives back what it held. Empty
    when there are too few steps to judge.
    """
    last = max((s.step for s in samples), default=0)
    samples = [s for s in samples if s.checkpoint_mb and s.step < last]
    if len({s.step for s in samples}) < 5:
        return {}
    rises = {name: growth([(s.step, getattr(s, name)) for s in samples]) for name in BOUNDS}
    return {name: (rise, BOUNDS[name][0] + BOUNDS[name][1] * steps / 100) for name, (rise, steps) in rises.items()}


def leaks(samples: Sequence[Sample]) -> list[str]:
    """Series of one process that grow beyond their bounds, or that cannot be judged."""
    if not (growths := grown(samples)):
        return ["too few steps were sampled to judge growth"]
    return [f"{name} grew by {rise:.2f}, {most:.2f} allowed" for name, (rise, most) in growths.items() if rise > most]


def excesses(samples: Sequence[Sample], quiet: Sequence[Sample], disk_mb: float) -> list[str]:
    """Gauges of disturbed processes beyond those of an undisturbed one, or a run directory of more than `disk_mb`."""
    most = {name: max(getattr(s, name) for s in quiet) + BOUNDS[name][0] for name in BOUNDS} | {"disk_mb": disk_mb}
    worst = {name: max(getattr(s, name) for s in samples) for name in most}
    return [
        f"{name} reached {worst[name]:.1f}, {most[name]:.1f} are allowed" for name in most if worst[name] > most[name]
    ]


def disagreements(due: Sequence[dict], got: Sequence[dict]) -> list[str]:
    """Steps that are double, missing or out of order, and columns of a step that differ."""
    steps, known = [record["step"] for record in got], {record["step"]: record for record in due}
    violations = []
    if steps != list(known):
        double = sorted(step for step, count in Counter(steps).items() if count > 1)
        violations.append(f"steps: double {double}, missing {sorted(known.keys() - steps)}, or out of order")
    for record in got:
        expected = known.get(record["step"], {})
        names = {name for name in record.keys() | expected.keys() if not name.startswith(COSTS)}
        if odd := sorted(name for name in names if record.get(name) != expected.get(name)):
            violations.append(f"step {record['step']} differs in {', '.join(odd)}")
    return violations
