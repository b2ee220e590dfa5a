"""The picture of a step with and without rollouts ahead: `python -m benchmarks.timeline run=FILE.json out=FILE.png`.

Draws the means of benchmarks.ahead to scale: what trainer and worker do, one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ahead import RUNS, Step
from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.results import plots
from specrl.rollout.sections import doc

COLOURS = {
    "weights": plots.BLACK,
    "rollout": plots.BLUE,
    "rewards": plots.PINK,
    "update": plots.ORANGE,
    "rollout ahead": plots.SKY,
    "idle": "#EEEEEE",
}
LABELLED = 0.05  # of the longer step, from which on a span has its seconds written in it


@dataclass
class TimelineConfig:
    run: str = doc("", "what benchmarks.ahead or benchmarks.figures wrote")
    epoch: str = doc("all", "the epoch whose mean step is drawn")
    out: str = doc("docs/images/ahead.png", "the picture")


def main(config: TimelineConfig) -> int:
    if not Path(config.run).is_file():
        raise ConfigError(f"run={config.run}: there is no such file. Make it with python -m benchmarks.ahead out=FILE.")
    content = json.loads(Path(config.run).read_text(encoding="utf-8"))
    epochs = {line["epoch"]: line for line in content.get("result", content)["epochs"]}
    if config.epoch not in epochs:
        raise ConfigError(f"epoch={config.epoch}: {config.run} has {', '.join(epochs)}.")
    draw(epochs[config.epoch], config.out)
    print(config.out)
    return 0


def spans(step: Step) -> dict[str, list[tuple[str, float]]]:
    """What trainer and worker do in a step, one after the other: kinds and seconds."""
    ahead = min(step.get("ahead", 0.0), step["rest"])  # it began after the rollout of the previous step
    begin = ("weights", step["sync"])
    trainer = [("idle", step["rollout"]), ("rewards", step["reward"]), ("update", step["rest"] - step["reward"])]
    worker = [("rollout", step["rollout"]), ("rollout ahead", ahead), ("idle", step["rest"] - ahead)]
    return {"worker": [begin, *worker], "trainer": [begin, *trainer]}


def draw(line: Mapping[str, Any], path: str | Path) -> None:
    """A step of either run, as PNG. Args: line: an epoch that benchmarks.ahead measured."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 3.2), dpi=150, layout="constrained")
    longest = max(line[name]["seconds"] for name in RUNS)
    error = "" if line["error"] is None else f" ± {line['error']:.2f}"
    words = (
        "Without rollouts ahead: {:.2f} s a step",
        f"With rollouts ahead: {{:.2f}} s, {line['speedup']:.2f}x{error}",
    )
    panels = figure.subplots(2, 1, sharex=True)
    for panel, name, title in zip(panels, RUNS, words, strict=True):
        _bars(panel, line[name], longest)
        panel.set_title(title.format(line[name]["seconds"]), loc="left", fontweight="bold", fontsize=10)
        panel.spines[["top", "left", "right", "bottom"]].set_visible(False)
        panel.tick_params(length=0)
    panels[1].set_xlabel("seconds")
    panels[1].set_xlim(0, longest)
    patches = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8.5)
    figure.savefig(path, format="png")


def _bars(panel, step: Step, longest: float) -> None:
    """A bar for the worker and one for the trainer."""
    for who, done in spans(step).items():
        at = 0.0
        for kind, seconds in done:
            panel.barh(who, seconds, left=at, color=COLOURS[kind], height=0.7)
            if kind != "idle" and seconds > LABELLED * longest:
                colour = "white" if kind == "rollout" else plots.BLACK
                panel.text(
                    at + seconds / 2, who, f"{seconds:.2f}", va="center", ha="center", color=colour, fontsize=8.5
                )
            at += seconds


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=TimelineConfig, training=False))
