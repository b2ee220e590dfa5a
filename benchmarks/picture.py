"""The README's picture: `python -m benchmarks.picture run=DIR [baseline=DIR] out=FILE.png`.

Rollout seconds, plainly and with specrl, and the one reward curve that both have. With a baseline, the same run with
rollout.acceptance=off, these are all rollouts of both, which must end with the same bytes; without one, the run's own
control steps, whose tokens must not have differed. Anything else has no such picture and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.results import plots, savings
from specrl.results.evidence import pair
from specrl.results.records import RunRecords, load_run, run_option, total
from specrl.rollout.sections import doc

WEIGHTS = "model/model.safetensors"
SCOPE = "rollout, all these steps"
SMOOTH = 4  # steps to either side of a point of the curve, which is their mean


@dataclass
class PictureConfig:
    run: str = run_option("run directory, or the name of a run in outputs")
    baseline: str = doc("", "the same run with rollout.acceptance=off, on the same machine")
    out: str = doc("docs/images/claim.png", "the picture")


def main(config: PictureConfig) -> int:
    own = load_run(config.run)
    if config.baseline:
        saving, words = beside(own, load_run(config.baseline)), "both runs, the same bytes"
    else:
        saving, words = alone(own), "the same tokens on control steps"
    draw(saving, own, words, config.out)
    print(f"{saving.plain_s:.1f} s plainly, {saving.specrl_s:.1f} s with specrl: {saving.speedup}; {config.out}")
    return 0


def beside(own: RunRecords, baseline: RunRecords) -> savings.Saving:
    """All rollouts of both runs.

    Raises:
        ConfigError: the runs cannot be paired, or do not end with the same rewards and the same weights.
    """
    pairing = pair(own, baseline)
    if pairing.refusals:
        raise ConfigError(f"{own.path} and {baseline.path} make no pair: {pairing.refusals[0]}")
    if [record["reward"] for record in own.steps] != [record["reward"] for record in baseline.steps]:
        raise ConfigError(f"{own.path} and {baseline.path} have other rewards. Run both on one machine, in fp32.")
    if (own.path / WEIGHTS).read_bytes() != (baseline.path / WEIGHTS).read_bytes():
        raise ConfigError(f"{own.path} and {baseline.path} end with other weights. Run both on one machine, in fp32.")
    return next(row for row in pairing.savings if row.phase == SCOPE)


def alone(own: RunRecords) -> savings.Saving:
    """The rollouts of the run's control steps.

    Raises:
        ConfigError: there is none, or a row differed from plain decoding.
    """
    rows = [row for row in savings.measured(own.steps) if row.phase == SCOPE]
    if not rows or (differing := total(own.steps, "spec/control_mismatches")):
        what = f"{differing:.0f} rows that differ" if rows else "no control step"
        raise ConfigError(f"{own.path} has {what}. Try a run of config=grpo_math on a CPU.")
    return rows[0]


def draw(saving: savings.Saving, own: RunRecords, words: str, path: str | Path) -> None:
    """Two bars and a curve, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.4), dpi=150, layout="constrained")
    bars, curve = figure.subplots(1, 2)
    seconds = (saving.specrl_s, saving.plain_s)
    bars.barh(("specrl", "plain"), seconds, color=(plots.BLUE, plots.GREY), height=0.6)
    for place, value in enumerate(seconds):
        bars.text(value, place, f" {value:.1f} s", va="center")
    bars.set_xlim(0, 1.15 * max(seconds))
    bars.set_xticks([])
    bars.set_title(f"Rollout seconds: {saving.speedup.ratio:.1f}x", loc="left", fontweight="bold", fontsize=10)
    rewards = [record["reward"] for record in own.steps]
    smooth = [fmean(rewards[max(0, i - SMOOTH) : i + SMOOTH + 1]) for i in range(len(rewards))]
    curve.plot(range(1, len(smooth) + 1), smooth, color=plots.BLUE)
    curve.set_title(f"Reward: {words}", loc="left", fontweight="bold", fontsize=10)
    curve.set_xlabel("optimiser step")
    for panel in (bars, curve):
        panel.spines[["top", "left", "right"]].set_visible(False)
        panel.tick_params(length=0)
    bars.spines["bottom"].set_visible(False)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=PictureConfig, training=False))
