"""Compares several runs: comparison.md and comparison.png in the parent directory of the first run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from specrl.config.options import ConfigError, plain
from specrl.results import tables
from specrl.results.evidence import numerics, rule, unlike_machines
from specrl.results.plots import BLACK, BLUE, ORANGE, PINK, RED, SKY, TITLES, curve, figure, finish, series
from specrl.results.records import RunRecords, load_run, mean, number, total
from specrl.results.savings import costs, first_last, later, measured, step_s
from specrl.results.speedup import flips
from specrl.rollout.checks import values

ROWS = ("rule", "steps", "reward", "held-out", "speedup", "passes a row", "reuse gap", "rollout s", "step s")
LEGEND = """\
Reward: mean of the first and of the last epoch. Held-out: `eval/reward` before and after. Speedup: plain over specrl
rollout seconds on the run's own control steps, from epoch 2 on if there are any; a 95 % interval, a dash below 6 steps.
Passes a row: from epoch 2 on. Reuse gap: mean over control steps. Rollout seconds, with co-training, and step seconds:
of the whole run, net, control rows left out. They compare on one machine only."""
NEUTRAL = ("name", "output_dir", "resume")
COLOURS = (BLUE, ORANGE, "#009E73", RED, PINK, SKY, BLACK)
"""Colours of the runs in the picture: the colour-blind safe palette of Okabe and Ito."""


@dataclass(frozen=True)
class Comparison:
    """A written comparison."""

    columns: dict[str, dict[str, str]]
    """By run, the text of each cell in ROWS."""
    notes: list[str]
    files: list[Path]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The column names and the rows of cells."""
        return ["", *self.columns], [[row, *(column[row] for column in self.columns.values())] for row in ROWS]

    def show(self, console: Console | None = None) -> None:
        """Prints the table, the notes and the path of comparison.md."""
        console = console or Console()
        tables.show(console, "", *self.table())
        for line in self.notes:
            tables.note(console, f"note: {line}", "yellow")
        tables.note(console, f"comparison: {self.files[0]}")

    def markdown(self, picture: str) -> str:
        """The content of comparison.md; `picture` is the file name of the plot, empty if there is none."""
        lines = ["# Comparison of runs", "", *tables.markdown(*self.table()), "", LEGEND, ""]
        lines += [f"![reward, rollout seconds and reuse of the runs]({picture})", ""] * bool(picture)
        lines += ["Settings that differ, in the order of the table, and what else to know:", ""] * bool(self.notes)
        return "\n".join([*lines, *(f"- {line}" for line in self.notes)]) + "\n"


def write_comparison(run_dirs: Sequence[str | Path], plots: bool = True) -> Comparison:
    """Writes comparison.md and, if matplotlib is installed, comparison.png into the parent directory of the first run.

    Raises:
        ConfigError: a run does not exist or has no metrics, there are fewer than two runs, or one is listed twice.
    """
    runs = [load_run(name) for name in run_dirs]
    if len({run.path.resolve() for run in runs}) < max(2, len(runs)):
        given = ",".join(map(str, run_dirs))
        raise ConfigError(f"runs=[{given}] must name two or more different runs. Try run=DIR for a single one.")
    names = [run.path.name for run in runs]
    names = names if len(set(names)) == len(names) else [str(run.path) for run in runs]
    named = dict(zip(names, runs, strict=True))
    page, picture = (runs[0].path.parent / f"comparison.{kind}" for kind in ("md", "png"))
    drawn = plots and overlay(named, picture)
    columns = {name: column(run) for name, run in named.items()}
    made = Comparison(columns, _notes(named), [page, *([picture] if drawn else [])])
    page.write_text(made.markdown(picture.name if drawn else ""), encoding="utf-8")
    return made


def overlay(runs: Mapping[str, RunRecords], path: Path) -> bool:
    """Plots the same metrics of several runs, one colour per run; False without matplotlib."""
    if (drawing := figure()) is None:
        return False
    panels = drawing.subplots(1, 3)
    for at, (name, run) in enumerate(runs.items()):
        colour = COLOURS[at % len(COLOURS)]
        curve(panels[0], run.steps, "reward", colour, name)
        panels[0].plot(*series(run.evals, "eval/reward"), "D", color=colour, markersize=6, zorder=3)
        curve(panels[1], run.steps, "timing_s/gen", colour, name)
        curve(panels[2], run.steps, "spec/reused_ratio", colour, name)
    labels = ("mean reward; diamonds: evaluation", "rollout seconds per step", "share of response tokens reused")
    for panel, title, label in zip(panels, TITLES, labels, strict=True):
        finish(panel, title)
        panel.set_ylabel(label)
    panels[1].set_ylim(bottom=0)
    panels[2].set_ylim(0, 1)
    drawing.savefig(path, format="png")
    return True


def column(run: RunRecords) -> dict[str, str]:
    """The cells of one run, by name as in ROWS; a dash if nothing was measured."""
    rest, reward = later(run.steps), first_last(run.steps)
    held_out = [number(record, "eval/reward") for record in run.evals]
    speedups = [saving.speedup for saving in measured(run.steps) if saving.speedup]
    cells = (
        rule(run.config).partition(":")[0],
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


def _notes(runs: dict[str, RunRecords]) -> list[str]:
    """The settings that differ between the runs, and caveats for the comparison."""
    found, (first_name, first) = [], next(iter(runs.items()))
    for name, run in runs.items():
        if run.finished is False:
            found.append(f"{name} is unfinished; its last step is {run.last['step']}.")
        if run.config is None:
            found.append(f"{name} has no readable config.yaml, so what sets it apart is unknown.")
        if (parted := flips(run.steps)) and parted.count:
            found.append(f"{name}: on control steps {parted.told(numerics(run.config))}.")
        if unlike := unlike_machines(first, run):
            found.append(
                f"{name} ran on another machine than {first_name}: {'; '.join(unlike)}. Seconds do not compare."
            )
    configs = [run.config for run in runs.values()]
    given = [values(config) for config in configs] if all(configs) else []
    for key in given[0] if given else ():
        options = [each[key] for each in given]
        if key not in NEUTRAL and any(option != options[0] for option in options):
            found.append(f"{key}: {', '.join(map(plain, options))}")
    return found


def _show(value: float | None, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)
