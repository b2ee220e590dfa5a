"""What a run saved and learned: report.md, report.json and report.png, from the metrics in its directory.

    python -m specrl.report run=DIR [baseline=DIR]

Two kinds of evidence, never mixed: (a) control steps, whose rows the run itself also rolled out plainly with the same
keys; (b) a baseline run, matched step by step. All savings are net: `timing_s/gen` includes look-up, drafting,
verification, decoding and store. The control rollouts are part of `timing_s/step` and charged to neither side.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollout.config import doc
from specrl.config import Config, differences, load_saved
from specrl.config import run as run_command
from specrl.env import SUPPORTED, gpus, installed
from specrl.monitor import METRICS_FILE, RunRecords, load_run, number, to_json
from specrl.options import ConfigError

CHARGED = {"verify": "verify", "draft": "draft", "look-up": "lookup", "store": "store"}
PLAIN_PHASE = "prefill and decode"
COLUMNS = ("phase", "plain s", "specrl s", "saved s", "share")
LENGTH_GAP = 0.02  # mean response lengths further apart than this can fake or hide a speedup
EPOCH_END = 1 + 1e-6  # trainers compute the epoch as a quotient, so its whole numbers are inexact
BLUE, SKY, ORANGE, GREY, BLACK, RED = "#0072B2", "#56B4E9", "#E69F00", "#BBBBBB", "#222222", "#D55E00"  # Okabe and Ito
NO_PLOT = "report.png was not drawn: matplotlib is missing. Install it with: pip install 'specrl[plots]'."


@dataclass
class ReportOptions:
    run: str = doc("", "run directory, or the name of a run in outputs")
    baseline: str = doc("", "run directory of the same experiment with rollout.acceptance=off")
    plots: bool = doc(True, "draw report.png when matplotlib is installed")


@dataclass(frozen=True)
class Saving:
    """Seconds of one phase, or of whole rollouts, plainly and with specrl."""

    phase: str
    plain_s: float
    specrl_s: float

    @property
    def saved_s(self) -> float:
        return self.plain_s - self.specrl_s

    @property
    def share(self) -> float | None:
        """Saved share of this row's plain time; None where plain rollouts have no such phase."""
        return self.saved_s / self.plain_s if self.plain_s else None

    @property
    def speedup(self) -> float | None:
        return self.plain_s / self.specrl_s if self.specrl_s else None

    def cells(self) -> tuple[str, ...]:
        share = "" if self.share is None else f"{self.share:.0%}"
        return (self.phase, f"{self.plain_s:.1f}", f"{self.specrl_s:.1f}", f"{self.saved_s:.1f}", share)


@dataclass(frozen=True)
class Report:
    """A written report."""

    summary: dict
    """The content of report.json."""
    markdown: str
    tables: dict[str, list[Saving]]
    """Savings by kind of evidence, `measured` and `paired`; a kind that has none is absent."""
    files: list[Path] = field(default_factory=list)

    def show(self, console: Console | None = None) -> None:
        """Prints the savings tables, the notes and the path of report.md."""
        console = console or Console()
        for kind, savings in self.tables.items():
            table = Table(title=self.summary[kind]["title"], title_justify="left", title_style="bold", box=SIMPLE_HEAD)
            for column in COLUMNS:
                table.add_column(column, justify="left" if column == "phase" else "right")
            for saving in savings:
                table.add_row(*saving.cells(), style="bold" if saving.phase.startswith("rollout") else None)
            console.print(table, Text(_speedups(savings), style="bold"), "")
        reward = self.summary["reward"]
        console.print(f"reward: {_show(reward['first'])} -> {_show(reward['last'])} ({reward['window']})")
        for note in self.summary["notes"]:
            console.print(f"note: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        console.print(f"report: {self.files[0]}", markup=False, highlight=False, soft_wrap=True)


def write_report(run_dir: str | Path, baseline_dir: str | Path | None = None, plots: bool = True) -> Report:
    """Writes report.md, report.json and, when matplotlib is installed, report.png into the run directory.

    Raises:
        RunError: no such run, or no metrics in it.
    """
    own, baseline = load_run(run_dir), load_run(baseline_dir) if baseline_dir else None
    picture = own.path / "report.png"
    drawn = plots and draw(own, baseline, picture)
    summary, tables = summarise(own, baseline)
    summary["notes"] += [NO_PLOT] if plots and not drawn else []
    text = to_markdown(summary, tables, picture.name if drawn else "")
    pages = {own.path / "report.md": text, own.path / "report.json": to_json(summary) + "\n"}
    for page, content in pages.items():
        page.write_text(content, encoding="utf-8")
    return Report(summary, text, tables, [*pages, *([picture] if drawn else [])])


# Formulas


def total(steps: Iterable[dict], key: str) -> float:
    return sum(number(record, key) or 0.0 for record in steps)


def mean(steps: Iterable[dict], key: str) -> float | None:
    values = [value for record in steps if (value := number(record, key)) is not None]
    return fmean(values) if values else None


def epoch(record: dict) -> float:
    """Progress in epochs after the step, so 1.0 is the last step of epoch 1; 0 when it was not recorded."""
    return number(record, "epoch") or 0.0


def later(steps: Iterable[dict]) -> list[dict]:
    """Steps from epoch 2 on: those that could reuse text."""
    return [record for record in steps if epoch(record) > EPOCH_END]


def phases(steps: Sequence[dict]) -> dict[str, float]:
    """Seconds by phase, which add up to timing_s/gen. Whatever is not charged elsewhere is prefill and decode."""
    charged = {phase: total(steps, f"timing_s/{key}") for phase, key in CHARGED.items()}
    return {PLAIN_PHASE: total(steps, "timing_s/gen") - sum(charged.values()), **charged}


def control_steps(steps: Iterable[dict]) -> list[dict]:
    """Steps whose rows were also rolled out plainly."""
    return [record for record in steps if number(record, "spec/plain_s") and number(record, "timing_s/gen")]


def measured(steps: Sequence[dict]) -> list[Saving]:
    """Evidence (a): phases and totals over the control steps. A plain rollout is all prefill and decode."""
    if not (control := control_steps(steps)):
        return []
    plain = {PLAIN_PHASE: total(control, "spec/plain_s")}
    rows = [Saving(phase, plain.get(phase, 0.0), seconds) for phase, seconds in phases(control).items()]
    return rows + _totals(control, control, "spec/plain_s")


def matched(steps: Sequence[dict], baseline: Sequence[dict]) -> tuple[list[dict], list[dict]]:
    """The steps that both runs timed, in the same order."""
    by_step = {record["step"]: record for record in baseline if number(record, "timing_s/gen")}
    own = [record for record in steps if record["step"] in by_step and number(record, "timing_s/gen")]
    return own, [by_step[record["step"]] for record in own]


def paired(steps: Sequence[dict], baseline: Sequence[dict]) -> list[Saving]:
    """Evidence (b): phases, totals, and the step around them, over the steps that both runs timed."""
    own, plain = matched(steps, baseline)
    if not own:
        return []
    before, after = phases(plain), phases(own)
    rows = [Saving(phase, before[phase], after[phase]) for phase in after]
    rows += _totals(own, plain, "timing_s/gen")
    for key in ("reward", "update"):
        rows.append(Saving(key, total(plain, f"timing_s/{key}"), total(own, f"timing_s/{key}")))
    aside = ("timing_s/control", "timing_s/reuse_gap")
    whole = (total(side, "timing_s/step") - sum(total(side, key) for key in aside) for side in (plain, own))
    return [*rows, Saving("step, controls left out", *whole)]


def _totals(own: list[dict], plain: list[dict], key: str) -> list[Saving]:
    """Whole rollouts from epoch 2 on and over all these steps; `plain` holds the same steps, its seconds at `key`."""
    pairs = list(zip(own, plain, strict=True))
    scopes = {"from epoch 2 on": [pair for pair in pairs if later(pair[:1])], "all these steps": pairs}
    return [
        Saving(f"rollout, {scope}", total((p for _, p in part), key), total((o for o, _ in part), "timing_s/gen"))
        for scope, part in scopes.items()
        if part
    ]


def estimate(steps: Sequence[dict]) -> float | None:
    """Seconds saved over the whole run, extrapolated: gen seconds times (speedup of the control steps - 1).

    Epoch 1 and the rest are extrapolated apart. Epoch 1 counts as saving nothing when it has no control step; None
    when the rest has none.
    """
    saved, rest = 0.0, later(steps)
    for part in ([record for record in steps if epoch(record) <= EPOCH_END], rest):
        if control := control_steps(part):
            speedup = total(control, "spec/plain_s") / total(control, "timing_s/gen")
            saved += total(part, "timing_s/gen") * (speedup - 1)
        elif part is rest:
            return None
    return saved


def first_last(steps: Sequence[dict], key: str = "reward") -> dict:
    """Means over the first and the last epoch, or over 10 % of the steps when there are not two whole epochs."""
    end = max(epoch(record) for record in steps)
    if end > 2 - 1e-6:
        first = [record for record in steps if epoch(record) <= EPOCH_END]
        last = [record for record in steps if epoch(record) > end - 1 + 1e-6]
        return {"first": mean(first, key), "last": mean(last, key), "window": "mean of an epoch"}
    count = max(1, len(steps) // 10)
    return {"first": mean(steps[:count], key), "last": mean(steps[-count:], key), "window": f"mean of {count} step(s)"}


# Words


def law(config: Config | None) -> str:
    """One sentence on what the rollout rule of a run samples from."""
    if config is None:
        return "unknown, because the run's config.yaml is missing or unreadable."
    rollout = config.rollout
    if rollout.acceptance == "off":
        return "off: plain decoding without speculation."
    if rollout.acceptance == "lenient":
        return f"lenient, l={rollout.lenience:g}: SPEC-RL as published; biased towards the stored text."
    if not rollout.replay:
        return "exact, replay=0: the tokens plain decoding draws, with fresh noise at every visit: on-policy RL."
    return (
        f"exact, replay={rollout.replay:g}: the tokens plain decoding draws with the same keys; replayed rows are not "
        "independent of the weights, and spec/reuse_gap measures what that does."
    )


def notes(own: RunRecords, baseline: RunRecords | None) -> list[str]:
    """Everything a reader must know before quoting a number."""
    found, steps, config = [], own.steps, settings(own)
    if config and not finished(own, config):
        found.append(f"The run is unfinished; its last step is {steps[-1]['step']}.")
    if own.unreadable:
        found.append(f"{own.unreadable} unreadable line(s) of {METRICS_FILE} were left out.")
    if not control_steps(steps) and not (config and config.rollout.acceptance == "off"):
        found.append("No control steps, so no speedup was measured. rollout.measure_every sets them.")
    if not later(steps):
        found.append("There is no step from epoch 2 on, and only from there can text be reused.")
    if differing := total(steps, "spec/control_mismatches"):
        found.append(f"{differing:.0f} row(s) differed from plain decoding on control steps; they were not exact.")
    if lost := total(steps, "reward/failed"):
        found.append(f"{lost:.0f} response(s) got no reward and were left out of their groups.")
    return found + (_pair_notes(own, baseline) if baseline else [])


def _pair_notes(own: RunRecords, baseline: RunRecords) -> list[str]:
    mine, theirs = matched(own.steps, baseline.steps)
    if not mine:
        return [f"The runs have no timed step in common, so nothing is paired with {baseline.path}."]
    found = []
    if len(mine) < max(len(own.steps), len(baseline.steps)):
        found.append(f"{len(mine)} steps are paired, of {len(own.steps)} here and {len(baseline.steps)} there.")
    here, there = (mean(side, "completions/mean_length") for side in (mine, theirs))
    if here and there and abs(here / there - 1) > LENGTH_GAP:
        found.append(
            f"Mean response lengths differ by {abs(here / there - 1):.1%} ({here:.1f} tokens here, {there:.1f} in the "
            "baseline): part of the difference in time is a difference in length."
        )
    config, other = settings(own), settings(baseline)
    if config and other:
        if other.rollout.acceptance != "off":
            found.append(f"The baseline did not decode plainly: its rollout.acceptance is {other.rollout.acceptance}.")
        changes = [str(change) for change in differences(other, config) if change.matters and change.key != "name"]
        found += [f"The runs differ in more than the rollout rule: {', '.join(changes)}."] if changes else []
    return found


def settings(records: RunRecords) -> Config | None:
    try:
        return load_saved(records.path)
    except ConfigError:
        return None


def finished(records: RunRecords, config: Config) -> bool:
    if config.trainer.max_steps:
        return records.steps[-1]["step"] >= config.trainer.max_steps
    return epoch(records.steps[-1]) > config.trainer.epochs - 1e-6


def environment(run_dir: Path | None = None) -> dict:
    """CPU, GPUs and versions of a run that keeps them in environment.json, else of this machine."""
    if run_dir and (kept := run_dir / "environment.json").exists():
        return json.loads(kept.read_text(encoding="utf-8"))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    found = {name: installed(name) for name in ("specrl", *SUPPORTED)} | {"python": platform.python_version()}
    versions = {name: version for name, version in found.items() if version}
    return {"cpu": cpu, "cores": os.cpu_count(), "gpus": gpus(), "versions": versions}


def summarise(own: RunRecords, baseline: RunRecords | None) -> tuple[dict, dict[str, list[Saving]]]:
    """The content of report.json, and the savings tables."""
    steps, rest, config = own.steps, later(own.steps), settings(own)
    ratios = [number(record, "spec/plain_s") / number(record, "timing_s/gen") for record in control_steps(steps)]
    tables = {"measured": measured(steps)} | ({"paired": paired(steps, baseline.steps)} if baseline else {})
    tables = {kind: rows for kind, rows in tables.items() if rows}
    titles = {}
    if ratios:
        spread = f"{min(ratios):.2f}x to {max(ratios):.2f}x on single steps"
        titles["measured"] = f"(a) Measured on {len(ratios)} control step(s) of {len(steps)}, {spread}"
    if baseline:
        titles["paired"] = f"(b) Paired with {baseline.path}, {len(matched(steps, baseline.steps)[0])} step(s)"
    new, reused = (total(rest, f"spec/{kind}_tokens") for kind in ("new", "reused"))
    names = ("hit_rate", "full_reuse_ratio", "draft_acceptance_rate", "passes_per_row", "reuse_gap")
    summary = {
        "run": str(own.path),
        "baseline": str(baseline.path) if baseline else None,
        "config": {key: getattr(config, key) for key in ("name", "model", "data", "seed")} if config else None,
        "rule": law(config),
        "steps": len(steps),
        "finished": finished(own, config) if config else None,
        **{kind: {"title": titles[kind], "savings": [_row(saving) for saving in tables[kind]]} for kind in tables},
        "estimate_saved_s": estimate(steps),
        "control_s": total(steps, "timing_s/control"),
        "reward": first_last(steps),
        "eval": [{key: record[key] for key in record if key == "step" or "eval/" in key} for record in own.evals],
        "reuse": {"reused_ratio": reused / (reused + new) if reused + new else None}
        | {name: mean(rest, f"spec/{name}") for name in names},
        "ties": total(steps, "spec/ties"),
        "control_mismatches": total(steps, "spec/control_mismatches"),
        "notes": notes(own, baseline),
        "environment": environment(own.path),
    }
    return summary, tables


def _row(saving: Saving) -> dict:
    return {key: getattr(saving, key) for key in ("phase", "plain_s", "specrl_s", "saved_s", "share", "speedup")}


def to_markdown(summary: dict, tables: dict[str, list[Saving]], picture: str) -> str:
    """The content of report.md; `picture` is the file name of the plot, empty without one."""
    config, reuse, reward = summary["config"] or {}, summary["reuse"], summary["reward"]
    lines = [f"# {config.get('name', Path(summary['run']).name)}", ""]
    described = [f"{summary['steps']} steps", *(f"{key} {config[key]}" for key in config if key != "name")]
    lines += [f"{', '.join(described)}.", ""]
    lines += [line for note in summary["notes"] for line in (f"> {note}", "")]
    lines += [f"![reward, rollout seconds and reuse per step]({picture})", ""] if picture else []
    lines += ["## Savings", "", "Net: look-up, drafting, verification and storing are charged.", ""]
    for kind, rows in tables.items():
        lines += [f"**{summary[kind]['title']}**", "", f"| {' | '.join(COLUMNS)} |", "|---|---:|---:|---:|---:|"]
        lines += [f"| {' | '.join(row.cells())} |" for row in rows]
        lines += ["", _speedups(rows), ""]
        if kind == "measured" and (saved := summary["estimate_saved_s"]) is not None:
            lines += [f"Estimate, extrapolated from these to all {summary['steps']} steps: {saved:.1f} s saved.", ""]
    lines += [f"Control rollouts took {summary['control_s']:.1f} s, charged to neither side.", "", "## Learning", ""]
    lines += [f"- reward: {_show(reward['first'])} -> {_show(reward['last'])} ({reward['window']})"]
    for label, record in zip(("before", "after"), (summary["eval"][:1] + summary["eval"][1:][-1:]), strict=False):
        values = (f"{key.removeprefix('eval/')} {_show(number(record, key))}" for key in record if key != "step")
        lines += [f"- evaluation {label}, at step {record['step']}: {', '.join(values)}"]
    lines += ["", "## Reuse, from epoch 2 on", ""]
    lines += [f"- {name.replace('_', ' ')}: {_show(value)}" for name, value in reuse.items() if value is not None]
    lines += ["", "## Trust", "", f"- rollout rule: {summary['rule']}"]
    lines += [f"- rows that differed from plain decoding on control steps: {summary['control_mismatches']:.0f}"]
    lines += [f"- near-ties decided by a canonical pass: {summary['ties']:.0f}", "", "## Machine", ""]
    machine = summary["environment"]
    lines += [f"- CPU: {machine['cpu']}, {machine['cores']} cores", f"- GPU: {', '.join(machine['gpus']) or 'none'}"]
    lines += [f"- versions: {', '.join(f'{name} {version}' for name, version in machine['versions'].items())}"]
    return "\n".join(lines) + "\n"


def _speedups(rows: Sequence[Saving]) -> str:
    ratios = [f"{row.speedup:.2f}x {row.phase}" for row in rows if row.speedup and row.phase.startswith("rollout")]
    return f"Speedup: {'; '.join(ratios)}."


def _show(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


# Picture


def draw(own: RunRecords, baseline: RunRecords | None, path: Path) -> bool:
    """Draws the three panels; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(15, 4.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, 3)
    share = panels[2].twinx()
    _draw_reward(panels[0], own, baseline)
    _draw_seconds(panels[1], own.steps, baseline)
    _draw_reuse(panels[2], share, own.steps)
    for panel, title in zip(panels, ("Reward", "Rollout time", "Reuse"), strict=True):
        panel.set_title(title, loc="left", fontweight="bold")
        panel.set_xlabel("optimiser step")
        panel.grid(axis="y", color="#E6E6E6", linewidth=0.8)
        panel.set_axisbelow(True)
        lines, labels = panel.get_legend_handles_labels()
        more = share.get_legend_handles_labels() if panel is panels[2] else ([], [])
        place = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.14), "ncols": 3, "columnspacing": 1.0}
        panel.legend(lines + more[0], labels + more[1], **place, frameon=False, fontsize=8.5, handlelength=1.4)
    for panel in (*panels, share):
        panel.margins(x=0.01)
        panel.spines[["top", "left", "right"]].set_visible(False)
        panel.tick_params(length=0)
    for panel in panels[1:] if later(own.steps) else ():
        start, across = later(own.steps)[0]["step"] - 0.5, panel.get_xaxis_transform()
        panel.axvline(start, color="#888888", linewidth=0.9, linestyle=(0, (2, 3)))
        panel.annotate(" epoch 2", (start, 1), xycoords=across, va="top", fontsize=8, color="#666666")
    figure.savefig(path, format="png")
    return True


def _series(steps: Sequence[dict], key: str) -> tuple[list[int], list[float]]:
    kept = {record["step"]: value for record in steps if (value := number(record, key)) is not None}
    return list(kept), list(kept.values())


def _line(panel, steps: Sequence[dict], key: str, colour: str, label: str, style: str = "-") -> None:
    """The values pale, their moving mean over a twentieth of the run on top."""
    at, values = _series(steps, key)
    half = len(values) // 40
    smooth = [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
    panel.plot(at, values, color=colour, alpha=0.2, linewidth=1)
    panel.plot(at, smooth, style, color=colour, linewidth=1.8, label=label)


def _draw_reward(panel, own: RunRecords, baseline: RunRecords | None) -> None:
    _line(panel, own.steps, "reward", BLUE, "training")
    if baseline:
        _line(panel, baseline.steps, "reward", BLACK, "baseline", "--")
    at, values = _series(own.evals, "eval/reward")
    if at:
        panel.plot(at, values, "D", color=RED, markersize=6, label="evaluation", clip_on=False, zorder=3)
    panel.set_ylabel("mean reward")


def _draw_seconds(panel, steps: Sequence[dict], baseline: RunRecords | None) -> None:
    timed = [record for record in steps if number(record, "timing_s/gen")]
    split = [phases([record]) for record in timed]
    stack = {
        "verify": [seconds["verify"] for seconds in split],
        PLAIN_PHASE: [max(seconds[PLAIN_PHASE], 0.0) for seconds in split],
        "draft": [seconds["draft"] for seconds in split],
        "look-up, store": [seconds["look-up"] + seconds["store"] for seconds in split],
    }
    colours = (BLUE, SKY, ORANGE, GREY)
    at = [record["step"] for record in timed]
    panel.stackplot(at, *stack.values(), labels=list(stack), colors=colours, linewidth=0, step="mid")
    if baseline:
        _line(panel, baseline.steps, "timing_s/gen", BLACK, "plain: baseline run")
    elif control_steps(steps):
        panel.plot(*_series(steps, "spec/plain_s"), "o", color=BLACK, markersize=5, label="plain: control steps")
    panel.set_ylim(bottom=0)
    panel.set_ylabel("seconds per step")


def _draw_reuse(panel, share, steps: Sequence[dict]) -> None:
    panel.plot(*_series(steps, "spec/passes_per_row"), "--", color=ORANGE, linewidth=1.8, label="passes per row (left)")
    panel.set_ylim(bottom=0)
    panel.set_ylabel("forward passes per row")
    at, ratio = _series(steps, "spec/reused_ratio")
    share.plot(at, [100 * value for value in ratio], color=BLUE, linewidth=1.8, label="reused tokens (right)")
    share.set_ylim(0, 100)
    share.set_ylabel("% of response tokens reused")


def main(options: ReportOptions) -> int:
    if not options.run:
        raise ConfigError("No run given. Write run=DIR.")
    write_report(options.run, options.baseline or None, options.plots).show()
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main, schema=ReportOptions))
