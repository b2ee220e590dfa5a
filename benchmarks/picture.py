"""The pictures of the pages, drawn by `python -m benchmarks.figures` from the files of the figures.

A bar or point is the speed over the baseline that a user would run instead; the line is the baseline's.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.pages import ALL, ROOT, ablation, ahead_speedup, load, rival, speedup
from specrl.results.plots import BLACK, BLUE, GREY

PATH = ROOT / "docs" / "images" / "speed.png"
KINDS_PATH = ROOT / "docs" / "images" / "two_kinds.png"
TITLE = "Speed over the baseline: same tokens, two CPU cores, 1.2 M parameters"
ROWS = 32  # of the rollouts in the picture of both kinds
KEY = "Description"
"""Entry of the PNG that holds the values, for the test that compares them with the files."""


def bars() -> dict[str, float]:
    """What is drawn, in order: a label of two lines, and the speed over the baseline."""
    return {
        "Rollouts of GRPO, 128 steps\nover the same run without drafts": ratio(speedup("whole-runs", "paired", ALL)),
        "Rollouts of PPO, 128 steps\nover the same rows without drafts": ratio(speedup("ppo", "measured", ALL)),
        "vLLM with drafts of the last epoch\nover stock vLLM, compiled": ratio(rival("vllm-old-text")),
        "Whole steps of a first epoch, rollouts ahead\nover the worker idle during updates": ahead_speedup(),
        "256 rows, first epoch, no rollouts ahead\nover plain decoding": ratio(ablation(256, "first epoch")),
    }


def ratio(text: str) -> float:
    """2.32 from `2.32x (2.12 to 2.52)`."""
    return float(text.partition("x")[0])


def draw(path: Path = PATH) -> None:
    """Writes the picture as PNG."""
    from matplotlib.figure import Figure

    values = bars()
    figure = Figure(figsize=(9, 2.9), dpi=150, layout="constrained")
    panel = figure.subplots()
    colours = [BLUE if value > 1 else GREY for value in values.values()]
    panel.barh(range(len(values)), list(values.values()), color=colours, height=0.6)
    for row, value in enumerate(values.values()):
        panel.text(max(value, 1.0), row, f"  {value:.2f}x", va="center", fontweight="bold", fontsize=9)
    panel.axvline(1, color=BLACK, linewidth=0.9, zorder=0)
    panel.set_yticks(range(len(values)), list(values), fontsize=8.5)
    panel.invert_yaxis()
    panel.set_axisbelow(True)
    panel.set_xlim(0, 1.1 * max(values.values()))
    panel.set_xticks([0, 1, 2, 3], ["0", "1x", "2x", "3x"], fontsize=8.5)
    panel.set_title(TITLE, loc="left", fontweight="bold", fontsize=10)
    panel.spines[["top", "left", "right"]].set_visible(False)
    panel.tick_params(length=0)
    figure.savefig(path, format="png", metadata={KEY: json.dumps(values)})


def lines() -> dict[str, list[tuple[float, float]]]:
    """What the picture of both kinds of drafts shows: (entropy, speedup) of 32 rows at each temperature, by label."""
    machines = {"real": "two CPU cores", "real-gpu": "simulated H100, 1.5 B"}
    points: dict[str, list[tuple[float, float]]] = {}
    for name, machine in machines.items():
        for line in load(name)["result"]["lines"]:
            for timing in line["timings"] if line["rows"] == ROWS else ():
                label = f"{timing['kind']}, {machine}"
                points.setdefault(label, []).append((line["reading"]["entropy"], timing["speedup"]))
    return points


def draw_kinds(path: Path = KINDS_PATH) -> None:
    """Writes the picture of speed by entropy as PNG, a line for each kind of drafts and machine."""
    from matplotlib.figure import Figure

    values = lines()
    figure = Figure(figsize=(9, 3.4), dpi=150, layout="constrained")
    panel = figure.subplots()
    for label, points in values.items():
        colour = BLUE if "same key" in label else GREY
        style = "--" if "simulated" in label else "-"
        panel.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=4, label=label)
    panel.axhline(1, color=BLACK, linewidth=0.9, zorder=0)
    panel.set_ylim(0)
    panel.set_xlim(0)
    panel.set_xlabel("entropy of the policy, nats a token", fontsize=8.5)
    panel.set_ylabel("speed over plain decoding", fontsize=8.5)
    panel.set_title(
        "SmolLM2-135M-Instruct: which drafts pay at which entropy", loc="left", fontweight="bold", fontsize=10
    )
    panel.legend(fontsize=8.5, frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", metadata={KEY: json.dumps(values)})
