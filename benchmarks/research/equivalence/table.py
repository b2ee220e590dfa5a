"""The table of learning cost against speed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from benchmarks.research.equivalence.arms import OFF
from benchmarks.research.equivalence.tost import Comparison
from benchmarks.research.equivalence.verdicts import GAP_MARGIN, MARGIN, Check, Line
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
