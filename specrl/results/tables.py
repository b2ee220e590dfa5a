"""Tables of text cells for all commands, on a console of 80 columns and in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def show(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], bold: Collection[int] = ()
) -> None:
    """Prints a title and a table. The title is printed separately because rich would wrap it at the table's width.

    Args:
        columns: names; the first column is left-aligned and may wrap, the others are right-aligned.
        rows: cells in the order of the columns.
        bold: indices of rows in bold type.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    for at, name in enumerate(columns):
        table.add_column(name, justify="right" if at else "left", no_wrap=bool(at))
    for at, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold" if at in bold else None)
    if title:
        console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(table)


def note(console: Console, line: str, style: str = "") -> None:
    """Prints a line without interpreting markup and without wrapping it."""
    console.print(line, style=style or None, markup=False, highlight=False, soft_wrap=True)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of the table in Markdown."""
    ruler = f"|---|{'---:|' * (len(columns) - 1)}"
    return [f"| {' | '.join(columns).strip()} |", ruler, *(f"| {' | '.join(row)} |" for row in rows)]
