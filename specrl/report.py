"""What a run saved and learned: report.md, report.json and report.png, from the metrics in its directory.

    python -m specrl.report run=DIR [baseline=DIR]
    python -m specrl.report runs=[DIR,DIR,...]        # side by side, see specrl/compare.py

Two kinds of evidence, never mixed: (a) control steps, whose rows the run itself also rolled out plainly with the same
keys; (b) a baseline run, matched step by step. All savings are net: `timing_s/gen` includes look-up, drafting,
verification, decoding and store. The control rollouts are part of `timing_s/step` and charged to neither side.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollout.config import doc
from specrl.config import Config, differences, load_saved
from specrl.config import run as run_command
from specrl.env import ENVIRONMENT_FILE, machine
from specrl.monitor import METRICS_FILE, RunRecords, load_run, number, to_json
from specrl.options import ConfigError
from specrl.plots import draw
from specrl.savings import (
    Saving,
    breakdown,
    control_steps,
    epoch,
    estimate,
    first_last,
    later,
    matched,
    mean,
    measured,
    paired,
    step_speedup,
    total,
)

COLUMNS = ("phase", "plain s", "specrl s", "saved s", "share")
LENGTH_GAP = 0.02  # mean response lengths further apart than this can fake or hide a speedup
NO_PLOT = "report.png was not drawn: matplotlib is missing. Install it with: pip install 'specrl[plots]'."


@dataclass
class ReportOptions:
    run: str = doc("", "run directory, or the name of a run in outputs")
    baseline: str = doc("", "run directory of the same experiment with rollout.acceptance=off")
    runs: list[str] = field(default_factory=list, metadata={"help": "two or more runs to compare, instead of run"})
    plots: bool = doc(True, "draw the picture when matplotlib is installed")


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
        console = console or Console(highlight=False)
        for kind, savings in self.tables.items():
            table = Table(title=self.summary[kind]["title"], title_justify="left", title_style="bold", box=SIMPLE_HEAD)
            for column in COLUMNS:
                table.add_column(column, justify="left" if column == "phase" else "right")
            for saving in savings:
                table.add_row(*saving.cells(), style="bold" if saving.phase.startswith("rollout") else None)
            console.print(table, Text(_speedups(savings), style="bold"), "")
        reward = self.summary["reward"]
        console.print(f"reward: {shown(reward['first'])} -> {shown(reward['last'])} ({reward['window']})")
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


def law(config: Config | None) -> str:
    """One sentence on what the rollout rule of a run samples from."""
    if config is None:
        return "unknown, because the run's config.yaml is missing or unreadable."
    rollout = config.rollout
    if rollout.router.kind != "off":
        what = "old text" if rollout.acceptance == "judged" else "the draft model's text"
        return f"lossy: {what} stands where rollout.router.kind={rollout.router.kind} allows, by the law that drew it."
    if rollout.acceptance == "off":
        return "off: plain decoding without speculation."
    if rollout.acceptance == "lenient":
        return f"lenient, l={rollout.lenience:g}: SPEC-RL as published; biased towards the stored text."
    if not rollout.replay or (rollout.replay == "auto" and not rollout.replay_gap):
        return "exact, replay=0: the tokens plain decoding draws, with fresh noise at every visit: on-policy RL."
    share = f"auto within a gap of {rollout.replay_gap:g}" if rollout.replay == "auto" else f"{rollout.replay:g}"
    return (
        f"exact, replay={share}: the tokens plain decoding draws with the same keys; replayed rows are not "
        "independent of the weights, and spec/reuse_gap measures what that does."
    )


def notes(own: RunRecords, baseline: RunRecords | None) -> list[str]:
    """Everything a reader must know before quoting a number."""
    found, steps, config = [], own.steps, settings(own)
    if config and not finished(own, config):
        found.append(f"The run is unfinished; its last step is {own.last['step']}.")
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
        return records.last["step"] >= config.trainer.max_steps
    return epoch(records.last) > config.trainer.epochs - 1e-6


def environment(run_dir: Path) -> dict:
    """CPU, GPUs and versions the run had; those of this machine for a run that kept none."""
    kept = run_dir / ENVIRONMENT_FILE
    return json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else machine()


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
        "step_s": breakdown(steps),
        "step_speedup": step_speedup(steps),
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
    lines += [f"Control rollouts took {summary['control_s']:.1f} s, charged to neither side.", ""]
    lines += [*_steps(summary["step_s"], summary["step_speedup"], summary["steps"]), "## Learning", ""]
    lines += [f"- reward: {shown(reward['first'])} -> {shown(reward['last'])} ({reward['window']})"]
    for label, record in zip(("before", "after"), (summary["eval"][:1] + summary["eval"][1:][-1:]), strict=False):
        values = (f"{key.removeprefix('eval/')} {shown(number(record, key))}" for key in record if key != "step")
        lines += [f"- evaluation {label}, at step {record['step']}: {', '.join(values)}"]
    lines += ["", "## Reuse, from epoch 2 on", ""]
    lines += [f"- {name.replace('_', ' ')}: {shown(value)}" for name, value in reuse.items() if value is not None]
    lines += ["", "## Trust", "", f"- rollout rule: {summary['rule']}"]
    lines += [f"- rows that differed from plain decoding on control steps: {summary['control_mismatches']:.0f}"]
    lines += [f"- near-ties decided by a canonical pass: {summary['ties']:.0f}", "", "## Machine", ""]
    machine = summary["environment"]
    lines += [f"- CPU: {machine['cpu']}, {machine['cores']} cores", f"- GPU: {', '.join(machine['gpus']) or 'none'}"]
    lines += [f"- versions: {', '.join(f'{name} {version}' for name, version in machine['versions'].items())}"]
    return "\n".join(lines) + "\n"


def _steps(spent: dict[str, float], speedup: float | None, steps: int) -> list[str]:
    if not spent:
        return []
    whole = sum(spent.values())
    lines = ["## Where a step goes", "", "| phase | s a step | share |", "|---|---:|---:|"]
    lines += [f"| {name} | {s / steps:.2f} | {s / whole:.0%} |" for name, s in spent.items()]
    lines += [f"| step, controls left out | {whole / steps:.2f} | 100% |", ""]
    if speedup:
        lines += [f"Whole steps on the control steps, against plain rollouts: {speedup:.2f}x.", ""]
    return lines


def _speedups(rows: Sequence[Saving]) -> str:
    ratios = [f"{row.speedup:.2f}x {row.phase}" for row in rows if row.speedup and row.phase.startswith("rollout")]
    return f"Speedup: {'; '.join(ratios)}."


def shown(value: float | None) -> str:
    """A reward or rate for people."""
    return "unknown" if value is None else f"{value:.3f}"


def main(options: ReportOptions) -> int:
    if bool(options.run) == bool(options.runs) or (options.runs and options.baseline):
        raise ConfigError("Give one of run=DIR, run=DIR baseline=DIR, and runs=[DIR,DIR,...].")
    if options.runs:
        from specrl.compare import write_comparison

        write_comparison(options.runs, options.plots).show()
    else:
        write_report(options.run, options.baseline or None, options.plots).show()
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main, schema=ReportOptions))
