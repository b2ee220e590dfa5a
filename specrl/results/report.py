"""The report of a run, from its metrics: report.md, report.json and report.png.

Two kinds of evidence, never mixed: `measured`, control steps, whose rows the run also rolled out plainly with the same
keys; `paired`, a baseline run on the same machine, matched step by step. docs/metrics.md has the formulas.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from specrl.results import tables
from specrl.results.evidence import Evidence, evidence, notes, numbers, numerics, rule
from specrl.results.plots import draw
from specrl.results.records import RunRecords, load_run, mean, number, text, to_json, total
from specrl.results.savings import Estimate, breakdown, estimate, first_last, later, step_speedup
from specrl.results.speedup import flips
from specrl.run.machine import machine

if TYPE_CHECKING:
    from specrl.results.ahead import AheadSteps
    from specrl.results.evidence import Pairing

COLUMNS = ("phase", "plain s", "specrl s", "saved s", "share")
NET = """\
Net: look-up, drafting, verification, storing and co-training are charged. No step saves more than the largest saving
below the top tenth, so that one stalled step makes no figure."""
NO_PLOT = "report.png was not drawn: matplotlib is missing. Install it with: pip install 'specrl[plots]'."


@dataclass(frozen=True)
class Report:
    """A written report."""

    summary: dict
    """The content of report.json."""
    evidence: dict[str, Evidence]
    """By its kind."""
    ahead: AheadSteps | None
    markdown: str
    files: list[Path]

    def show(self, console: Console | None = None) -> None:
        """Prints the savings tables, the notes and the path of report.md."""
        console = console or Console()
        for each in self.evidence.values():
            rows = each.shown()
            bold = [at for at, row in enumerate(rows) if row.speedup]
            tables.show(console, each.title, COLUMNS, [row.cells() for row in rows], bold)
            for line in each.claims:
                tables.note(console, line, "bold")
            console.print()
        if self.ahead:
            if cells := self.ahead.rows():
                tables.show(console, self.ahead.title, self.ahead.columns, cells)
            tables.note(console, self.ahead.line)
            console.print()
        tables.note(console, learned(self.summary))
        for line in self.summary["notes"]:
            tables.note(console, f"note: {line}", "yellow")
        tables.note(console, f"report: {self.files[0]}")


def write_report(run_dir: str | Path, baseline_dir: str | Path | None = None, plots: bool = True) -> Report:
    """Writes report.md, report.json and, when matplotlib is installed, report.png into the run directory.

    Raises:
        ConfigError: no such run, or no metrics in it.
    """
    own, baseline = load_run(run_dir), load_run(baseline_dir) if baseline_dir else None
    pairing = early = None
    if baseline:
        from specrl.results.evidence import pair  # most runs have no baseline

        pairing = pair(own, baseline)
    if any("spec/ahead_ratio" in record for record in own.steps):
        from specrl.results.ahead import ahead

        early = ahead(own, baseline)
    found = evidence(own.steps, pairing)
    summary = summarise(own, pairing, found) | {"ahead": asdict(early) if early else None}
    page, numbers, picture = (own.path / f"report.{kind}" for kind in ("md", "json", "png"))
    drawn = plots and draw(own, baseline, picture, comparable="paired" in found, headline=_headline(found))
    summary["notes"] += [NO_PLOT] if plots and not drawn else []
    markdown = to_markdown(summary, found, early, picture.name if drawn else "")
    page.write_text(markdown, encoding="utf-8")
    numbers.write_text(to_json(summary) + "\n", encoding="utf-8")
    return Report(summary, found, early, markdown, [page, numbers, *([picture] if drawn else [])])


def _headline(found: dict[str, Evidence]) -> str:
    """What stands over the picture's seconds: the speedup over all its steps, where it needs no words beside it."""
    best = found.get("paired") or found.get("measured")
    if best is None:
        return ""
    told = [row.speedup for row in best.rows if row.speedup and row.phase.startswith("rollout")]
    return told[-1].brief if told and not best.caveat else ""


def summarise(own: RunRecords, pairing: Pairing | None, found: dict[str, Evidence]) -> dict:
    """The content of report.json."""
    steps, rest, config = own.steps, later(own.steps), own.config
    new, reused = (total(rest, f"spec/{kind}_tokens") for kind in ("new", "reused"))
    names = ("hit_rate", "full_reuse_ratio", "draft_acceptance_rate", "passes_per_row", "reuse_gap")
    guess = estimate(steps)
    return {
        "run": str(own.path),
        "baseline": str(pairing.baseline.path) if pairing else None,
        "config": {key: getattr(config, key) for key in ("name", "model", "data", "seed")} if config else None,
        "rule": rule(config),
        "steps": len(steps),
        "finished": own.finished,
        **{kind: each.summary() for kind, each in found.items()},
        "estimate": asdict(guess) if guess else None,
        "control_s": total(steps, "timing_s/control"),
        "step_s": breakdown(steps),
        "step_speedup": numbers(step_speedup(steps)),
        "reward": first_last(steps),
        "eval": [{key: record[key] for key in record if key == "step" or "eval/" in key} for record in own.evals],
        "reuse": {"reused_ratio": reused / (reused + new) if reused + new else None}
        | {name: mean(rest, f"spec/{name}") for name in names},
        "ties": total(steps, "spec/ties"),
        "flips": asdict(parted) | {"told": parted.told(numerics(config))} if (parted := flips(steps)) else None,
        "notes": notes(own, pairing),
        "environment": own.machine or machine(),
    }


def to_markdown(summary: dict, found: dict[str, Evidence], early: AheadSteps | None, picture: str) -> str:
    """The content of report.md; `picture` is the file name of the plot, empty without one."""
    config, reuse = summary["config"] or {}, summary["reuse"]
    lines = [f"# {config.get('name', Path(summary['run']).name)}", ""]
    described = [f"{summary['steps']} steps", *(f"{key} {config[key]}" for key in config if key != "name")]
    lines += [f"{', '.join(described)}.", ""]
    lines += [line for note in summary["notes"] for line in (f"> {note}", "")]
    lines += [f"![reward, rollout seconds and reuse per step]({picture})", ""] if picture else []
    lines += ["## Savings", "", NET, ""]
    for kind, each in found.items():
        lines += [f"**{each.title}**", "", *tables.markdown(COLUMNS, [row.cells() for row in each.shown()])]
        lines += ["", *(f"- {line}" for line in each.claims), ""]
        if kind == "measured" and summary["estimate"]:
            lines += [Estimate(**summary["estimate"]).told(summary["steps"]), ""]
    lines += [f"Control rollouts took {summary['control_s']:.1f} s, charged to neither side.", ""]
    if early:
        lines += [f"**{early.title}**", "", *tables.markdown(early.columns, early.rows()), ""] if early.rows() else []
        lines += [early.line, ""]
    lines += [*_steps(summary["step_s"], summary["steps"]), "## Learning", ""]
    lines += [f"- {learned(summary)}"]
    for label, record in zip(("before", "after"), (summary["eval"][:1] + summary["eval"][1:][-1:]), strict=False):
        values = (f"{key.removeprefix('eval/')} {shown(number(record, key))}" for key in record if key != "step")
        lines += [f"- evaluation {label}, at step {record['step']}: {', '.join(values)}"]
    lines += ["", "## Reuse, from epoch 2 on", ""]
    lines += [f"- {name.replace('_', ' ')}: {shown(value)}" for name, value in reuse.items() if value is not None]
    lines += ["", "## Trust", "", f"- rollout rule: {summary['rule']}"]
    lines += [f"- compared with plain decoding on control steps: {compared(summary)}"]
    lines += [f"- near-ties decided by a canonical pass: {summary['ties']:.0f}", "", "## Machine", ""]
    kept = summary["environment"]
    lines += [f"- CPU: {kept['cpu']}, {kept['cores']} cores", f"- GPU: {', '.join(kept['gpus']) or 'none'}"]
    lines += [f"- versions: {', '.join(f'{name} {version}' for name, version in kept['versions'].items())}"]
    return "\n".join(lines) + "\n"


def _steps(spent: dict[str, float], steps: int) -> list[str]:
    if not spent:
        return []
    whole = sum(spent.values())
    parts = [(name, text(s / steps, 2), f"{text(100 * s / whole, 0)}%") for name, s in spent.items()]
    rows = [*(part for part in parts if float(part[1])), ("step, controls left out", f"{whole / steps:.2f}", "100%")]
    return ["## Where a step goes", "", *tables.markdown(("phase", "s a step", "share"), rows), ""]


def learned(summary: dict) -> str:
    """The reward at both ends of the run."""
    reward = summary["reward"]
    return f"reward: {shown(reward['first'])} -> {shown(reward['last'])} ({reward['window']})"


def compared(summary: dict) -> str:
    """What control steps found when they compared tokens."""
    return summary["flips"]["told"] if summary["flips"] else "unknown, as there were none"


def shown(value: float | None) -> str:
    """A reward or rate for people."""
    return "unknown" if value is None else f"{value:.3f}"
