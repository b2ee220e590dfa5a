"""Several runs side by side: comparison.md and comparison.png, beside the first run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rollout.checks import values
from specrl.monitor import RunRecords, load_run, number
from specrl.options import ConfigError, plain
from specrl.pairing import settings, unlike_machines
from specrl.plots import overlay
from specrl.report import finished
from specrl.savings import costs, counted, first_last, later, mean, measured, step_s, total

ROWS = ("rule", "steps", "reward", "held-out", "speedup", "passes a row", "reuse gap", "rollout s", "step s")
LEGEND = """\
Reward: mean of the first and of the last epoch. Held-out: `eval/reward` before and after. Speedup: plain over specrl
rollout seconds on the run's own control steps, from epoch 2 on if there are any; a 95 % interval, a dash below 6 steps.
Passes a row: from epoch 2 on. Reuse gap: mean over control steps. Rollout seconds, with co-training, and step seconds:
of the whole run, net, control rows left out. They compare on one machine only."""
NEUTRAL = ("name", "output_dir", "resume")


@dataclass(frozen=True)
class Comparison:
    """A written comparison."""

    columns: dict[str, dict[str, str]]
    """ROWS as text, by run."""
    notes: list[str]
    files: list[Path]

    def show(self, console: Console | None = None) -> None:
        """Prints the table, the notes and the path of comparison.md."""
        console = console or Console(highlight=False)
        table = Table("", box=SIMPLE_HEAD)
        for name in self.columns:
            table.add_column(name, justify="right")
        for row in ROWS:
            table.add_row(row, *(column[row] for column in self.columns.values()))
        console.print(table)
        for note in self.notes:
            console.print(f"note: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        console.print(f"comparison: {self.files[0]}", markup=False, highlight=False, soft_wrap=True)


def write_comparison(run_dirs: Sequence[str | Path], plots: bool = True) -> Comparison:
    """Writes comparison.md and, when matplotlib is installed, comparison.png into the directory of the first run's.

    Raises:
        RunError: no such run, or no metrics in it.
        ConfigError: fewer than two runs, or one of them twice.
    """
    runs = [load_run(name) for name in run_dirs]
    if len({run.path.resolve() for run in runs}) < max(2, len(runs)):
        given = ",".join(map(str, run_dirs))
        raise ConfigError(f"runs=[{given}] must name two or more different runs. Try run=DIR for a single one.")
    names = labels(runs)
    columns = {name: column(run) for name, run in zip(names, runs, strict=True)}
    picture = runs[0].path.parent / "comparison.png"
    drawn = plots and overlay(dict(zip(names, runs, strict=True)), picture)
    notes = _notes(names, runs)
    page = runs[0].path.parent / "comparison.md"
    page.write_text(_markdown(columns, notes, picture.name if drawn else ""), encoding="utf-8")
    return Comparison(columns, notes, [page, *([picture] if drawn else [])])


def labels(runs: Sequence[RunRecords]) -> list[str]:
    """The runs' directory names; paths where two have the same name."""
    names = [run.path.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def column(run: RunRecords) -> dict[str, str]:
    """ROWS of one run; a dash where nothing was measured."""
    rest, reward = later(run.steps), first_last(run.steps)
    held_out = [number(record, "eval/reward") for record in run.evals]
    speedups = [saving.speedup for saving in measured(run.steps) if saving.speedup]
    cells = (
        rule(run),
        str(len(run.steps)),
        f"{_show(reward['first'])} -> {_show(reward['last'])}",
        f"{_show(held_out[0])} -> {_show(held_out[-1])}" if held_out else "-",
        f"{speedups[0].low:.2f}x to {speedups[0].high:.2f}x" if speedups and speedups[0].low is not None else "-",
        _show(mean(rest, "spec/passes_per_row"), "{:.1f}"),
        _show(mean(run.steps, "spec/reuse_gap"), "{:+.3f}"),
        f"{total(run.steps, 'timing_s/gen') + sum(costs(run.steps).values()):.1f}",
        f"{step_s(run.steps):.1f}",
    )
    return dict(zip(ROWS, cells, strict=True))


def rule(run: RunRecords) -> str:
    """The rollout rule in a few words."""
    if (config := settings(run)) is None:
        return "unknown"
    rollout = config.rollout
    replay = rollout.replay if rollout.replay == "auto" else f"{rollout.replay:g}"
    detail = {"exact": f", replay={replay}", "lenient": f", l={rollout.lenience:g}"}
    return rollout.law + detail.get(rollout.law, "")


def _notes(names: Sequence[str], runs: Sequence[RunRecords]) -> list[str]:
    """What makes the runs differ, and what must be known before they are compared."""
    configs = [settings(run) for run in runs]
    found = []
    for name, run, config in zip(names, runs, configs, strict=True):
        if config and not finished(run, config):
            found.append(f"{name} is unfinished; its last step is {run.last['step']}.")
        if config is None:
            found.append(f"{name} has no readable config.yaml, so what sets it apart is unknown.")
        if differing := total(run.steps, "spec/control_mismatches"):
            found.append(f"{name}: {counted(differing, 'row')} differed from plain decoding on control steps.")
        if unlike := unlike_machines(runs[0].path, run.path):
            found.append(f"{name} ran on another machine than {names[0]}: {'; '.join(unlike)}. Seconds do not compare.")
    given = [values(config) for config in configs] if all(configs) else []
    for key in given[0] if given else ():
        options = [each[key] for each in given]
        if key not in NEUTRAL and any(option != options[0] for option in options):
            found.append(f"{key}: {', '.join(map(plain, options))}")
    return found


def _show(value: float | None, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)


def _markdown(columns: dict[str, dict[str, str]], notes: Sequence[str], picture: str) -> str:
    lines = ["# Comparison of runs", "", f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    lines += [f"| {row} | {' | '.join(column[row] for column in columns.values())} |" for row in ROWS]
    lines += ["", LEGEND, ""]
    lines += [f"![reward, rollout seconds and reuse of the runs]({picture})", ""] if picture else []
    lines += ["Settings that differ, in the order of the table, and what else to know:", ""] if notes else []
    return "\n".join([*lines, *(f"- {note}" for note in notes)]) + "\n"
