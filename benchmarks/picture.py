"""The README's picture: `python -m benchmarks.picture run=DIR baseline=DIR out=FILE.png`.

Seconds of all rollouts, plainly and with specrl, and the one reward curve of both. The baseline is the same run with
rollout.law=off; a pair that does not end with the same bytes has no such picture and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rollout.config import doc
from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.results import plots
from specrl.results.pairing import pair
from specrl.results.records import RunRecords, load_run, run_option
from specrl.results.savings import Saving, paired

WEIGHTS = "model/model.safetensors"
SCOPE = "rollout, all these steps"
SMOOTH = 4  # steps to either side of a point of the curve, which is their mean


@dataclass
class PictureConfig:
    run: str = run_option("run directory, or the name of a run in outputs")
    baseline: str = doc("", "the same run with rollout.law=off, on the same machine")
    out: str = doc("docs/images/claim.png", "the picture")


def main(config: PictureConfig) -> int:
    own, baseline = load_run(config.run), load_run(config.baseline)
    saving = measured(own, baseline)
    draw(saving, own, config.out)
    print(f"{saving.plain_s:.1f} s plainly, {saving.specrl_s:.1f} s with specrl: {saving.speedup}; {config.out}")
    return 0


def measured(own: RunRecords, baseline: RunRecords) -> Saving:
    """The rollouts of both runs.

    Raises:
        ConfigError: the runs cannot be paired, or do not end with the same rewards and the same weights.
    """
    if refusals := pair(own, baseline).refusals:
        raise ConfigError(f"{own.path} and {baseline.path} make no pair: {refusals[0]}")
    rewards = [[record["reward"] for record in run.steps] for run in (own, baseline)]
    first, second = ((run.path / WEIGHTS).read_bytes() for run in (own, baseline))
    if rewards[0] != rewards[1] or first != second:
        what = "weights" if rewards[0] == rewards[1] else "rewards"
        raise ConfigError(f"{own.path} and {baseline.path} end with other {what}. Run both on one machine, in fp32.")
    return next(row for row in paired(own.steps, baseline.steps) if row.phase == SCOPE)


def draw(saving: Saving, own: RunRecords, path: str | Path) -> None:
    """Two bars and a curve, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6), dpi=150, layout="constrained")
    bars, curve = figure.subplots(1, 2, width_ratios=(3, 2))
    seconds = (saving.specrl_s, saving.plain_s)
    bars.barh(("specrl", "plain"), seconds, color=(plots.BLUE, plots.GREY), height=0.6)
    for place, value in enumerate(seconds):
        bars.text(value, place, f" {value:.0f} s", va="center")
    bars.set_xlim(0, 1.15 * max(seconds))
    bars.set_title(f"Rollout seconds of the run: {saving.speedup.ratio:.1f}x", loc="left", fontweight="bold")
    rewards = [record["reward"] for record in own.steps]
    curve.plot([fmean(rewards[max(0, i - SMOOTH) : i + SMOOTH + 1]) for i in range(len(rewards))], color=plots.BLUE)
    curve.set_title("Reward of both: the same bytes", loc="left", fontweight="bold")
    curve.set_xlabel("optimiser step")
    for panel in (bars, curve):
        panel.spines[["top", "left", "right", "bottom"]].set_visible(False)
        panel.tick_params(length=0)
    bars.set_xticks([])
    figure.savefig(path, format="png")


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=PictureConfig, training=False))
