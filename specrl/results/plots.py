"""The plot of the report: reward, rollout seconds and reuse over the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from specrl.results.records import RunRecords, number
from specrl.results.savings import PLAIN_PHASE, control_steps, costs, later, phases, rollouts

BLUE, SKY, ORANGE, GREY, BLACK = "#0072B2", "#56B4E9", "#E69F00", "#BBBBBB", "#222222"  # Okabe and Ito
RED, PINK = "#D55E00", "#CC79A7"
TITLES = ("Reward", "Rollout time", "Reuse")


def draw(own: RunRecords, baseline: RunRecords | None, path: Path, comparable: bool = True, headline: str = "") -> bool:
    """Plots the three panels; False without matplotlib.

    Args:
        comparable: whether to plot the baseline's seconds too.
        headline: the speedup with its interval, as the title of the seconds.
    """
    if (drawing := figure()) is None:
        return False
    panels = drawing.subplots(1, 3)
    share = panels[2].twinx()
    _draw_reward(panels[0], own, baseline)
    _draw_seconds(panels[1], own.steps, baseline if comparable else None)
    _draw_reuse(panels[2], share, own.steps)
    for panel, title in zip(panels, TITLES, strict=True):
        finish(panel, title, share if panel is panels[2] else None)
    panels[1].set_title(headline, loc="right", fontsize=8.5)
    for panel in panels[1:] if later(own.steps) else ():
        start, across = later(own.steps)[0]["step"] - 0.5, panel.get_xaxis_transform()
        panel.axvline(start, color="#888888", linewidth=0.9, linestyle=(0, (2, 3)))
        panel.annotate(" epoch 2", (start, 1), xycoords=across, va="top", fontsize=8, color="#666666")
    drawing.savefig(path, format="png")
    return True


def figure():
    """An empty figure; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(figsize=(15, 4.6), dpi=150, layout="constrained")


def finish(panel, title: str, share=None) -> None:
    """Adds title, grid, legend and frame; `share` is the panel's second axis."""
    panel.set_title(title, loc="left", fontweight="bold")
    panel.set_xlabel("optimiser step")
    panel.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    panel.set_axisbelow(True)
    lines, labels = panel.get_legend_handles_labels()
    more = share.get_legend_handles_labels() if share else ([], [])
    place = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.14), "ncols": 3, "columnspacing": 1.0}
    panel.legend(lines + more[0], labels + more[1], **place, frameon=False, fontsize=8.5, handlelength=1.4)
    for axis in (panel, share) if share else (panel,):
        axis.margins(x=0.01)
        axis.spines[["top", "left", "right"]].set_visible(False)
        axis.tick_params(length=0)


def series(steps: Sequence[dict], key: str) -> tuple[list[int], list[float]]:
    kept = {record["step"]: value for record in steps if (value := number(record, key)) is not None}
    return list(kept), list(kept.values())


def curve(panel, steps: Sequence[dict], key: str, colour: str, label: str, style: str = "-") -> None:
    """Plots the values in a pale colour, and on top of them their moving mean over a twentieth of the run."""
    at, values = series(steps, key)
    half = len(values) // 40
    smooth = [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
    panel.plot(at, values, color=colour, alpha=0.2, linewidth=1)
    panel.plot(at, smooth, style, color=colour, linewidth=1.8, label=label)


def _draw_reward(panel, own: RunRecords, baseline: RunRecords | None) -> None:
    curve(panel, own.steps, "reward", BLUE, "training")
    if baseline:
        curve(panel, baseline.steps, "reward", BLACK, "baseline", "--")
    at, values = series(own.evals, "eval/reward")
    if at:
        panel.plot(at, values, "D", color=RED, markersize=6, label="evaluation", clip_on=False, zorder=3)
    panel.set_ylabel("mean reward")


def _draw_seconds(panel, steps: Sequence[dict], baseline: RunRecords | None) -> None:
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
        curve(panel, baseline.steps, "timing_s/gen", BLACK, "plain: baseline run")
    elif control_steps(steps):
        panel.plot(*series(steps, "spec/plain_s"), "o", color=BLACK, markersize=5, label="plain: control steps")
    panel.set_ylim(bottom=0)
    panel.set_ylabel("seconds per step")


def _draw_reuse(panel, share, steps: Sequence[dict]) -> None:
    panel.plot(*series(steps, "spec/passes_per_row"), "--", color=ORANGE, linewidth=1.8, label="passes per row (left)")
    panel.set_ylim(bottom=0)
    panel.set_ylabel("forward passes per row")
    at, ratio = series(steps, "spec/reused_ratio")
    share.plot(at, [100 * value for value in ratio], color=BLUE, linewidth=1.8, label="reused tokens (right)")
    share.set_ylim(0, 100)
    share.set_ylabel("% of response tokens reused")
