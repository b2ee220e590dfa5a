"""The plot of the report: reward, rollout seconds and reuse over the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from specrl.results.records import RunRecords, number
from specrl.results.savings import PLAIN_PHASE, control_steps, costs, later, phases, rollouts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, SKY, ORANGE, GREY, BLACK = "#0072B2", "#56B4E9", "#E69F00", "#BBBBBB", "#222222"  # Okabe and Ito
RED, PINK = "#D55E00", "#CC79A7"


def draw(run: RunRecords, baseline: RunRecords | None, path: Path) -> bool:
    """Plots the three panels; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(15, 4.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, 3)
    _draw_reward(panels[0], run, baseline)
    _draw_seconds(panels[1], run.steps, baseline)
    _draw_reuse(panels[2], run.steps)
    for panel, title in zip(panels, ("Reward", "Rollout time", "Reuse"), strict=True):
        _finish(panel, title)
    if rest := later(run.steps):
        for panel in panels[1:]:
            start = rest[0]["step"] - 0.5
            panel.axvline(start, color="#888888", linewidth=0.9, linestyle=(0, (2, 3)))
            panel.annotate(" epoch 2", (start, 1), xycoords=panel.get_xaxis_transform(), va="top", fontsize=8)
    figure.savefig(path, format="png")
    return True


def _finish(panel: Axes, title: str) -> None:
    """Adds title, grid, legend and frame."""
    panel.set_title(title, loc="left", fontweight="bold")
    panel.set_xlabel("optimiser step")
    panel.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.14), ncols=3, frameon=False, fontsize=8.5)
    panel.margins(x=0.01)
    panel.spines[["top", "left", "right"]].set_visible(False)
    panel.tick_params(length=0)


def _series(steps: Sequence[dict], key: str) -> tuple[list[int], list[float]]:
    kept = {record["step"]: value for record in steps if (value := number(record, key)) is not None}
    return list(kept), list(kept.values())


def _curve(panel: Axes, steps: Sequence[dict], key: str, colour: str, label: str, style: str = "-") -> None:
    """Plots the values in a pale colour, and on top of them their moving mean over a twentieth of the run."""
    at, values = _series(steps, key)
    half = len(values) // 40
    smooth = [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
    panel.plot(at, values, color=colour, alpha=0.2, linewidth=1)
    panel.plot(at, smooth, style, color=colour, linewidth=1.8, label=label)


def _draw_reward(panel: Axes, run: RunRecords, baseline: RunRecords | None) -> None:
    _curve(panel, run.steps, "reward", BLUE, "training")
    if baseline:
        _curve(panel, baseline.steps, "reward", BLACK, "baseline", "--")
    at, values = _series(run.evals, "eval/reward")
    if at:
        panel.plot(at, values, "D", color=RED, markersize=6, label="evaluation", clip_on=False, zorder=3)
    panel.set_ylabel("mean reward")


def _draw_seconds(panel: Axes, steps: Sequence[dict], baseline: RunRecords | None) -> None:
    timed = rollouts(steps)
    split = [phases([record]) for record in timed]
    stack = {
        "verify": [seconds["verify"] for seconds in split],
        PLAIN_PHASE: [max(seconds[PLAIN_PHASE], 0.0) for seconds in split],
        "draft": [seconds["draft"] for seconds in split],
        "look-up, store": [seconds["look-up"] + seconds["store"] for seconds in split],
    }
    stack |= {name: [costs([record]).get(name, 0.0) for record in timed] for name in costs(timed)}
    colours = (BLUE, SKY, ORANGE, GREY, RED, PINK)
    at = [record["step"] for record in timed]
    panel.stackplot(at, *stack.values(), labels=list(stack), colors=colours, linewidth=0, step="mid")
    if baseline:
        _curve(panel, baseline.steps, "timing_s/gen", BLACK, "plain: baseline run")
    elif control_steps(steps):
        panel.plot(*_series(steps, "spec/plain_s"), "o", color=BLACK, markersize=5, label="plain: control steps")
    panel.set_ylim(bottom=0)
    panel.set_ylabel("seconds per step")


def _draw_reuse(panel: Axes, steps: Sequence[dict]) -> None:
    at, ratio = _series(steps, "spec/reused_ratio")
    panel.plot(at, [100 * value for value in ratio], color=BLUE, linewidth=1.8, label="reused tokens")
    panel.set_ylim(0, 100)
    panel.set_ylabel("% of response tokens reused")
