"""The table and the picture of learning cost against speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.equivalence.arms import OFF
from benchmarks.equivalence.tost import Comparison
from benchmarks.equivalence.verdicts import GAP_MARGIN, MARGIN, Check, Line
from specrl.results import tables

COLUMNS = ("rule", "passes/token", "reused", "final reward", "less off (90 %)", f"+-{MARGIN}", "gap", f"+-{GAP_MARGIN}")


def show(lines: Sequence[Line], checks: Sequence[Check]) -> None:
    """Prints one table per algorithm, then every check."""
    console = Console(width=130)
    for algorithm in dict.fromkeys(found.algorithm for found in lines):
        tables.show(console, algorithm, COLUMNS, [cells(found) for found in lines if found.algorithm == algorithm])
    for check in checks:
        console.print(f"{'ok     ' if check.ok else 'INVALID'} {check.name}: {check.found}", markup=False)


def cells(found: Line) -> list[str]:
    """One row of COLUMNS."""
    learning, gap = found.learning, found.gap
    interval = f"{learning.mean:+.3f} [{learning.low:+.3f}, {learning.high:+.3f}]"
    own = [f"{found.final:.3f}", interval, verdict(learning)]
    if found.arm == OFF.name:
        own[1:] = ["", ""]
    spread = f"{gap.mean:+.4f} +- {gap.sd / gap.n**0.5:.4f}"
    return [found.arm, f"{found.passes:.2f}", f"{found.reused:.0%}", *own, spread, verdict(gap)]


def verdict(found: Comparison) -> str:
    if found.verdict != "underpowered":
        return found.verdict
    return f"INVALID: underpowered ({found.power:.2f}, needs {found.needed} seeds)"


def draw(lines: Sequence[Line], path: Path) -> None:
    """Learning cost over passes, one panel per algorithm."""
    from matplotlib.figure import Figure

    from specrl.results.plots import BLUE, GREY, ORANGE, RED

    algorithms = list(dict.fromkeys(found.algorithm for found in lines))
    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(algorithms), sharey=True)
    for panel, algorithm in zip(panels, algorithms, strict=True):
        panel.axhspan(-MARGIN, MARGIN, color="#EFEFEF", label=f"margin of {MARGIN}")
        for prefix, colour, style in (("exact", BLUE, "o"), ("lenient", ORANGE, "s"), ("control", RED, "x")):
            own = [found for found in lines if found.algorithm == algorithm and found.arm.startswith(prefix)]
            own.sort(key=lambda found: found.passes)
            means = [found.learning.mean for found in own]
            bars = [found.learning.high - found.learning.mean for found in own]
            panel.errorbar([f.passes for f in own], means, yerr=bars, fmt=style, color=colour, label=prefix, capsize=2)
            for i, (found, mean) in enumerate(zip(own, means, strict=True)):
                text = found.arm.partition(", ")[2] or found.arm.partition(": ")[2]
                side, beside = ("right", -5) if text == "full reuse" else ("left", 5)  # the large leniences are there
                place = {"xytext": (beside, -11 if i % 2 else 4), "textcoords": "offset points", "ha": side}
                panel.annotate(text, (found.passes, mean), **place, fontsize=7.5)
        panel.axhline(0, color=GREY, linewidth=1)
        panel.set_title(algorithm, loc="left", fontweight="bold")
        panel.set_xlabel("forward passes per token (1 without drafts)")
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.15)
    panels[0].set_ylabel("final expected reward, less that of plain decoding")
    panels[0].legend(frameon=False, fontsize=8.5, loc="lower right")
    figure.savefig(path, format="png")
