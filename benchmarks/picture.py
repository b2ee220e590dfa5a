"""The README's picture, drawn by `python -m benchmarks.figures` from the files of the figures.

A bar is the speed over the baseline that a user would run instead; the line is the baseline's.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.pages import ALL, ROOT, ablation, ahead_speedup, rival, speedup
from specrl.results.plots import BLACK, BLUE, GREY

PATH = ROOT / "docs" / "images" / "speed.png"
TITLE = "Speed over the baseline: same tokens, two CPU cores, 1.2 M parameters"
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
