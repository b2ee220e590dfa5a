"""What `help=true` and `help=SECTION` print, and the tables of docs/configuration.md."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from specrl.config.options import ConfigError, plain
from specrl.rollout.checks import Option, options, sections, suggestion

EXIT_CODES = """exit codes: 0 done; 2 the command line or configuration is wrong; 3 a rollout, cache or reward failed;
            130 interrupted; 143 terminated, after a checkpoint; 1 anything else, with a traceback"""
MARKS = ("<!-- options: begin -->", "<!-- options: end -->")


def help_text(topic: str, schema: type) -> str:
    """Help on everything (`true`), on a section, or on one option."""
    known, groups = options(schema), sections(schema)
    if topic == "true":
        return "\n\n".join(part for part in (_overview(groups), describe(_own(known))) if part)
    chosen = [option for key, option in known.items() if key == topic or key.startswith(f"{topic}.")]
    if not chosen:
        raise ConfigError(
            f"No option or section '{topic}'.{suggestion(topic, [*groups, *known])} help=true shows the sections."
        )
    return describe(chosen)


def _own(known: dict[str, Option]) -> list[Option]:
    return [option for key, option in known.items() if "." not in key]


def _overview(groups: dict[str, str]) -> str:
    commands = [(f"python -m specrl.{name}", line) for name, line in _entry_points()]
    commands += [("config=list", "the known configs"), ("help=SECTION", "the options of a section, or one option")]
    commands += [("dry_run=true", "check, print what is not at its default and the sizes of the run, and stop")]
    named = [(f"help={key}", line) for key, line in groups.items()]
    module = Path(sys.argv[0]).stem
    command = f"specrl.{module}" if any(name == module for name, _ in _entry_points()) else "specrl.train"
    lines = [f"usage: python -m {command} {'config=NAME ' if 'trainer' in groups else ''}key=value ...", ""]
    lines += [f"{left:26}  {right}" for left, right in commands] + ["", EXIT_CODES, "", "sections:"]
    return "\n".join(lines + [f"{left:26}  {right}" for left, right in named])


def _entry_points() -> list[tuple[str, str]]:
    """Modules of specrl that can be run, with the first line of their docstring."""
    front, found = Path(__file__).parents[1], []
    for path in (*front.glob("*.py"), front / "bench" / "__main__.py"):
        text = path.read_text(encoding="utf-8")
        if "\nif __name__ ==" in text:
            name = path.parent.name if path.stem == "__main__" else path.stem
            found.append((name, text.split('"""')[1].partition("\n")[0]))
    return sorted(found)


def _default(option: Option) -> str:
    return plain(option.default) or '""'


def _kinds(option: Option) -> list[str]:
    """What a value may be: types such as `int` or `list[str]`, and the choices."""
    if option.is_list or option.is_mapping:
        return [str(option.type)]
    types = [member for member in option.members if member in (bool, int, float, str)]
    return [*(member.__name__ for member in types), *option.choices]


def list_configs(known: Mapping[str, Path]) -> str:
    """One line per named config: the name and the first comment line of its file."""
    lines = []
    for name, path in known.items():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        lines.append(f"{name:16}  {first.lstrip('# ') if first.startswith('#') else path}")
    return "\n".join(lines) or "No configs here. Give config=PATH."


def describe(chosen: Iterable[Option]) -> str:
    """Options for a terminal: key, default and type on one line, the documentation below."""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = []
    for option in chosen:
        lines.append(f"{option.key} = {_default(option)}    ({' | '.join(_kinds(option))})")
        lines += textwrap.wrap(option.help, width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def table(chosen: Iterable[Option]) -> str:
    """Options as a markdown table."""
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for option in chosen:
        kinds = ", ".join(f"`{kind}`" for kind in _kinds(option))
        default = _default(option).replace(",", ", ")  # a long list must wrap
        cells = (f"`{option.key}`", kinds, f"`{default}`", option.help)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def reference(schema: type) -> str:
    """All options as markdown: one table for the run and one per section."""
    known = options(schema)
    parts = ["## Run", table(_own(known))]
    for key, line in sections(schema).items():
        own = [option for name, option in known.items() if name.rpartition(".")[0] == key]
        parts += [f"## {key}", *([f"{line[0].upper()}{line[1:]}."] if line else []), table(own)]
    return "\n\n".join(parts)


def updated_page(page: str, schema: type) -> str:
    """docs/configuration.md with the tables between its markers renewed."""
    head, tail = page.partition(MARKS[0])[0], page.partition(MARKS[1])[2]
    return f"{head}{MARKS[0]}\n\n{reference(schema)}\n\n{MARKS[1]}{tail}"
