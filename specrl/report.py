"""What a run saved and learned: report.md, report.json and report.png, from the metrics in its directory.

    python -m specrl.report run=DIR [baseline=DIR]
    python -m specrl.report runs=[DIR,DIR,...]        # side by side, see specrl/compare.py

Two kinds of evidence, never mixed: `measured`, control steps, whose rows the run also rolled out plainly with the same
keys; `paired`, a baseline run on the same machine, matched step by step. docs/metrics.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles

from rich.console import Console

from rollout.config import doc
from specrl import compare, tables
from specrl.config import Config
from specrl.config import run as run_command
from specrl.env import machine
from specrl.options import ConfigError
from specrl.pairing import Pairing, pair, speculates
from specrl.plots import draw
from specrl.records import METRICS_FILE, RunRecords, load_run, number, run_option, to_json
from specrl.savings import (
    COSTS,
    Estimate,
    Saving,
    breakdown,
    control_pairs,
    counted,
    estimate,
    first_last,
    later,
    matched,
    mean,
    measured,
    paired,
    step_speedup,
    text,
    total,
)
from specrl.speedup import FEWEST, Speedup

COLUMNS = ("phase", "plain s", "specrl s", "saved s", "share")
NET = """\
Net: look-up, drafting, verification, storing and co-training are charged. No step saves more than the largest saving
below the top tenth, so that one stalled step makes no figure."""
NO_PLOT = "report.png was not drawn: matplotlib is missing. Install it with: pip install 'specrl[plots]'."


@dataclass
class ReportOptions:
    run: str = run_option("run directory, or the name of a run in outputs")
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
        console = console or Console()
        for kind, savings in self.tables.items():
            rows = _shown(savings)
            bold = [at for at, row in enumerate(rows) if row.speedup]
            tables.show(console, self.summary[kind]["title"], COLUMNS, [row.cells() for row in rows], bold)
            for line in self.summary[kind]["claims"]:
                tables.note(console, line, "bold")
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
    summary, savings = summarise(own, pair(own, baseline) if baseline else None)
    picture = own.path / "report.png"
    drawn = plots and draw(own, baseline, picture, comparable="paired" in savings, headline=_headline(summary, savings))
    summary["notes"] += [NO_PLOT] if plots and not drawn else []
    markdown = to_markdown(summary, savings, picture.name if drawn else "")
    pages = {own.path / "report.md": markdown, own.path / "report.json": to_json(summary) + "\n"}
    for page, content in pages.items():
        page.write_text(content, encoding="utf-8")
    return Report(summary, markdown, savings, [*pages, *([picture] if drawn else [])])


def _headline(summary: dict, savings: dict[str, list[Saving]]) -> str:
    """What stands over the picture's seconds: the speedup over all its steps, where it needs no words beside it."""
    kind = "paired" if "paired" in savings else "measured"
    found = [row.speedup for row in savings.get(kind, ()) if row.speedup and row.phase.startswith("rollout")]
    return found[-1].brief if found and not summary[kind]["caveat"] else ""


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


def notes(own: RunRecords, pairing: Pairing | None) -> list[str]:
    """Everything a reader must know before quoting a number."""
    found, steps, config = [], own.steps, own.config
    if own.finished is False:
        found.append(f"The run is unfinished; its last step is {own.last['step']}.")
    if own.unreadable:
        found.append(f"{counted(own.unreadable, 'unreadable line')} of {METRICS_FILE} left out.")
    paired_with = pairing and not pairing.refusals
    if not paired_with and not control_pairs(steps) and (config is None or speculates(config)):
        found.append(_unmeasured(config))
    if not later(steps) and not any(number(record, "spec/hit_rate") for record in steps):
        found.append("No step is from epoch 2 on, so no prompt had old text of its own to draft from.")
    if differing := total(steps, "spec/control_mismatches"):
        found.append(f"{counted(differing, 'row')} differed from plain decoding on control steps: not exact.")
    if lost := total(steps, "reward/failed"):
        found.append(f"{counted(lost, 'response')} got no reward and took no part in the update.")
    return found + (pairing.refusals + pairing.notes if pairing else [])


def _unmeasured(config: Config | None) -> str:
    """Why there are no control steps."""
    if config is None:
        return "No control steps, so no speedup was measured."
    if config.rollout.acceptance != "exact" or config.rollout.router.kind != "off":
        return (
            "No speedup was measured: control steps compare with plain decoding, whose text a lossy rule does not "
            "write. Give baseline=DIR, a run with rollout.acceptance=off."
        )
    every = config.rollout.measure_every
    return f"No control steps, so no speedup was measured: with rollout.measure_every={every} the run had none."


def summarise(own: RunRecords, pairing: Pairing | None) -> tuple[dict, dict[str, list[Saving]]]:
    """The content of report.json, and the savings tables."""
    steps, rest, config = own.steps, later(own.steps), own.config
    evidence, savings = _evidence(steps, pairing)
    new, reused = (total(rest, f"spec/{kind}_tokens") for kind in ("new", "reused"))
    names = ("hit_rate", "full_reuse_ratio", "draft_acceptance_rate", "passes_per_row", "reuse_gap")
    guess = estimate(steps)
    summary = {
        "run": str(own.path),
        "baseline": str(pairing.baseline.path) if pairing else None,
        "config": {key: getattr(config, key) for key in ("name", "model", "data", "seed")} if config else None,
        "rule": law(config),
        "steps": len(steps),
        "finished": own.finished,
        **evidence,
        "estimate": asdict(guess) if guess else None,
        "control_s": total(steps, "timing_s/control"),
        "step_s": breakdown(steps),
        "step_speedup": _numbers(step_speedup(steps)),
        "reward": first_last(steps),
        "eval": [{key: record[key] for key in record if key == "step" or "eval/" in key} for record in own.evals],
        "reuse": {"reused_ratio": reused / (reused + new) if reused + new else None}
        | {name: mean(rest, f"spec/{name}") for name in names},
        "ties": total(steps, "spec/ties"),
        "control_mismatches": total(steps, "spec/control_mismatches"),
        "notes": notes(own, pairing),
        "environment": own.machine or machine(),
    }
    return summary, savings


def _evidence(steps: Sequence[dict], pairing: Pairing | None) -> tuple[dict[str, dict], dict[str, list[Saving]]]:
    """Title, claims and rows of each kind of evidence that there is, for report.json; and its table."""
    found, savings = {}, {}
    if rows := measured(steps):
        whole = step_speedup(steps)
        more = [Saving("step, controls left out", 0.0, 0.0, whole)] if whole else []
        found["measured"] = {"title": _measured_title(steps), "claims": claims([*rows, *more]), "caveat": ""}
        savings["measured"] = rows
    if pairing and not pairing.refusals:
        rows, other = paired(steps, pairing.baseline.steps), pairing.baseline
        title = f"Paired with {other.path}, {counted(len(matched(steps, other.steps)[0]), 'step')}"
        found["paired"] = {"title": title, "claims": claims(rows, pairing.caveat), "caveat": pairing.caveat}
        savings["paired"] = rows
    return {kind: each | {"savings": [_row(row) for row in savings[kind]]} for kind, each in found.items()}, savings


def _measured_title(steps: Sequence[dict]) -> str:
    pairs = control_pairs(steps)
    spread = ""
    if len(pairs) >= FEWEST:
        low, _, high = quantiles([pair.plain_s / pair.own_s for pair in pairs], method="inclusive")
        spread = f"; the middle half {low:.2f}x to {high:.2f}x"
    return f"Measured on {counted(len(pairs), 'control step')} of {len(steps)}{spread}"


def claims(rows: Sequence[Saving], caveat: str = "") -> list[str]:
    """A sentence for every speedup of a table; `caveat` says what else could have made it."""
    charged = [row.phase for row in rows if row.phase in COSTS and row.phase != "cache to disk"]  # storing is usual
    words = f", {' and '.join(charged)} charged" * bool(charged) + caveat
    return [f"Speedup of the {row.phase}{words}: {row.speedup}" for row in rows if row.speedup]


def _numbers(found: Speedup | None) -> dict | None:
    return asdict(found) | {"told": found.told} if found else None


def _row(saving: Saving) -> dict:
    found = {key: getattr(saving, key) for key in ("phase", "plain_s", "specrl_s", "saved_s", "share")}
    return found | {"speedup": _numbers(saving.speedup)}


def _shown(rows: Sequence[Saving]) -> list[Saving]:
    """Without phases that took no time to speak of."""
    return [row for row in rows if row.speedup or any(float(cell) for cell in row.cells()[1:4])]


def to_markdown(summary: dict, savings: dict[str, list[Saving]], picture: str) -> str:
    """The content of report.md; `picture` is the file name of the plot, empty without one."""
    config, reuse = summary["config"] or {}, summary["reuse"]
    lines = [f"# {config.get('name', Path(summary['run']).name)}", ""]
    described = [f"{summary['steps']} steps", *(f"{key} {config[key]}" for key in config if key != "name")]
    lines += [f"{', '.join(described)}.", ""]
    lines += [line for note in summary["notes"] for line in (f"> {note}", "")]
    lines += [f"![reward, rollout seconds and reuse per step]({picture})", ""] if picture else []
    lines += ["## Savings", "", NET, ""]
    for kind, rows in savings.items():
        lines += [f"**{summary[kind]['title']}**", ""]
        lines += tables.markdown(COLUMNS, [row.cells() for row in _shown(rows)])
        lines += ["", *(f"- {line}" for line in summary[kind]["claims"]), ""]
        if kind == "measured" and summary["estimate"]:
            lines += [_estimated(Estimate(**summary["estimate"]), summary["steps"]), ""]
    lines += [f"Control rollouts took {summary['control_s']:.1f} s, charged to neither side.", ""]
    lines += [*_steps(summary["step_s"], summary["steps"]), "## Learning", ""]
    lines += [f"- {learned(summary)}"]
    for label, record in zip(("before", "after"), (summary["eval"][:1] + summary["eval"][1:][-1:]), strict=False):
        values = (f"{key.removeprefix('eval/')} {shown(number(record, key))}" for key in record if key != "step")
        lines += [f"- evaluation {label}, at step {record['step']}: {', '.join(values)}"]
    lines += ["", "## Reuse, from epoch 2 on", ""]
    lines += [f"- {name.replace('_', ' ')}: {shown(value)}" for name, value in reuse.items() if value is not None]
    lines += ["", "## Trust", "", f"- rollout rule: {summary['rule']}"]
    lines += [f"- rows that differed from plain decoding on control steps: {summary['control_mismatches']:.0f}"]
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


def _estimated(found: Estimate, steps: int) -> str:
    """The estimate for people; without one where its interval holds 0."""
    if found.low is None or found.low <= 0 <= found.high:
        return f"Extrapolated to all {counted(steps, 'step')}: no difference that can be told from noise."
    interval = f"95 % interval {found.low:.1f} to {found.high:.1f} s"
    return f"Extrapolated to all {counted(steps, 'step')}: {found.saved_s:.1f} s saved ({interval})."


def learned(summary: dict) -> str:
    """The reward at both ends of the run."""
    reward = summary["reward"]
    return f"reward: {shown(reward['first'])} -> {shown(reward['last'])} ({reward['window']})"


def shown(value: float | None) -> str:
    """A reward or rate for people."""
    return "unknown" if value is None else f"{value:.3f}"


def main(options: ReportOptions) -> int:
    if bool(options.run) == bool(options.runs) or (options.runs and options.baseline):
        raise ConfigError("Give one of run=DIR, run=DIR baseline=DIR, and runs=[DIR,DIR,...].")
    if options.runs:
        compare.write_comparison(options.runs, options.plots).show()
    else:
        write_report(options.run, options.baseline or None, options.plots).show()
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main, schema=ReportOptions))
