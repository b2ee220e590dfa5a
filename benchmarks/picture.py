"""The README's picture: `python -m benchmarks.picture run=DIR out=FILE.png`.

Rollout seconds of a run's control steps, plainly and with specrl, and the reward curve that both share. A run without
control steps, or with a row that differed on one of them, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.results import plots, savings
from specrl.results.records import RunRecords, load_run, run_option, total
from specrl.rollout.sections import doc

SCOPE = "rollout, all these steps"
SMOOTH = 4  # steps to either side of a point of the curve, which is their mean


@dataclass
class PictureConfig:
    run: str = run_option("run directory, or the name of a run in outputs")
    out: str = doc("docs/images/claim.png", "the picture")


def main(config: PictureConfig) -> int:
    run = load_run(config.run)
    saving = control_steps(run)
    draw(saving, run, config.out)
    print(f"{saving.plain_s:.1f} s plainly, {saving.specrl_s:.1f} s with specrl: {saving.speedup}; {config.out}")
    return 0


def control_steps(run: RunRecords) -> savings.Saving:
    """Seconds of the run's control steps, which were rolled out both ways.

    Raises:
        ConfigError: there is none, or a row differed from plain decoding.
    """
    rows = [row for row in savings.measured(run.steps) if row.phase == SCOPE]
    if not rows or (differing := total(run.steps, "spec/control_mismatches")):
        what = f"{differing:.0f} rows that differ" if rows else "no control step"
        raise ConfigError(f"{run.path} has {what}. Try a run of config=grpo_math on a CPU.")
    return rows[0]


def draw(saving: savings.Saving, run: RunRecords, path: str | Path) -> None:
    """Two bars and a curve, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.4), dpi=150, layout="constrained")
    bars, curve = figure.subplots(1, 2)
    seconds = (saving.specrl_s, saving.plain_s)
    bars.barh(("specrl", "plain"), seconds, color=(plots.BLUE, plots.GREY), height=0.6)
    for row, value in enumerate(seconds):
        bars.text(value, row, f" {value:.1f} s", va="center")
    bars.set_xlim(0, 1.15 * max(seconds))
    bars.set_xticks([])
    bars.set_title(f"Rollout seconds: {saving.speedup.ratio:.1f}x", loc="left", fontweight="bold", fontsize=10)
    rewards = [record["reward"] for record in run.steps]
    smooth = [fmean(rewards[max(0, i - SMOOTH) : i + SMOOTH + 1]) for i in range(len(rewards))]
    curve.plot(range(1, len(smooth) + 1), smooth, color=plots.BLUE)
    curve.set_title("Reward: the same tokens on control steps", loc="left", fontweight="bold", fontsize=10)
    curve.set_xlabel("optimiser step")
    for panel in (bars, curve):
        panel.spines[["top", "left", "right"]].set_visible(False)
        panel.tick_params(length=0)
    bars.spines["bottom"].set_visible(False)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=PictureConfig, training=False))
