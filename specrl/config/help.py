"""What `help=true` and `help=KEY` print, and the tables of docs/configuration.md.

`python -m specrl.config.help` updates that page.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from specrl.config.options import ConfigError, plain
from specrl.rollout.checks import Option, options, sections, suggestion

COMMANDS = {
    "train": "train a policy",
    "report": "what a run saved, alone or against baseline=DIR",
    "evaluate": "pass@k and mean reward of a policy",
    "bench": "whether drafts pay for a policy, measured before anything is trained",
    "verify": "responses of a finished run decoded again from a checkpoint",
    "drafter": "distil a draft model or a head from a policy",
    "serve": "a vLLM server whose requests can have keys and drafts; takes vLLM's options",
    "train_router": "train a step router",
    "train_judge": "train a judge of draft tokens",
    "env": "versions, hardware and settings for a bug report",
}
"""What each module that `python -m specrl.NAME` runs does."""
EXIT_CODES = """exit codes: 0 done; 2 the command line or configuration is wrong; 3 a rollout, cache or reward failed;
            130 interrupted; 143 terminated, after a checkpoint; 1 anything else, with a traceback"""
MARKS = ("<!-- options: begin -->", "<!-- options: end -->")


def help_text(topic: str, schema: type) -> str:
    """Help on everything (`true`), on a section, or on one option."""
    known = options(schema)
    groups = sections(schema)
    if topic == "true":
        overview = _overview(groups, takes_config="trainer" in groups)
        top = describe(option for key, option in known.items() if "." not in key)
        return f"{overview}\n\n{top}".rstrip("\n")
    chosen = [option for key, option in known.items() if key == topic or key.startswith(f"{topic}.")]
    if not chosen:
        near = suggestion(topic, [*groups, *known])
        raise ConfigError(f"No option or section '{topic}'.{near} help=true shows the sections.")
    return describe(chosen)


def _overview(groups: Mapping[str, str], takes_config: bool) -> str:
    started = Path(sys.argv[0])  # a module, the `__main__` of a package, or "specrl COMMAND"
    name = started.parent.name if started.stem == "__main__" else started.stem.split()[-1]
    program = name if name in COMMANDS else "train"
    lines = {
        **{f"python -m specrl.{name}": summary for name, summary in COMMANDS.items()},
        "config=list": "the known configs",
        "help=SECTION": "the options of a section, or one option",
        "dry_run=true": "check, print what is not at its default and the sizes of the run, and stop",
    }
    return "\n".join(
        [
            f"usage: python -m specrl.{program} {'config=NAME ' if takes_config else ''}key=value ...",
            "",
            *(f"{left:26}  {right}" for left, right in lines.items()),
            "",
            EXIT_CODES,
            "",
            "sections:",
            *(f"{f'help={key}':26}  {line}" for key, line in groups.items()),
        ]
    )


def list_configs(known: Mapping[str, Path]) -> str:
    """One line per named config: the name and the first comment line of its file."""
    lines = []
    for name, path in known.items():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        lines.append(f"{name:16}  {first.lstrip('# ') if first.startswith('#') else path}")
    return "\n".join(lines) or "No configs here. Give config=PATH."


def _kinds(option: Option) -> list[str]:
    """The types of a value, such as `int` or `list[str]`, and the choices."""
    if option.container:
        return [str(option.type)]
    return [*(kind.__name__ for kind in option.members if kind in (bool, int, float, str)), *option.choices]


def describe(chosen: Iterable[Option]) -> str:
    """Options for a terminal: key, default and type on one line, the description below."""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = []
    for option in chosen:
        default = plain(option.default) or '""'
        lines.append(f"{option.key} = {default}    ({' | '.join(_kinds(option))})")
        lines += textwrap.wrap(option.help, width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def table(chosen: Iterable[Option]) -> str:
    """Options as a markdown table. The default shows the type; after it come the other choices."""
    rows = ["| option | default; other values | meaning |", "|---|---|---|"]
    for option in chosen:
        default = (plain(option.default) or '""').replace(",", ", ")  # so that a long list can wrap
        others = [kind for kind in _kinds(option) if kind != default] if option.choices else []
        values = ", ".join(f"`{value}`" for value in others)
        cells = (f"`{option.key}`", f"`{default}`{'; ' if values else ''}{values}", option.help)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def updated_page(page: str, schema: type) -> str:
    """docs/configuration.md with new tables between its markers: one for the run and one per section."""
    parts = []
    for section, line in {"": "", **sections(schema)}.items():
        parts.append(f"## {section or 'Run'}")
        if line:
            parts.append(f"{line[0].upper()}{line[1:]}.")
        parts.append(table(option for key, option in options(schema).items() if key.rpartition(".")[0] == section))
    head = page.partition(MARKS[0])[0]
    tail = page.partition(MARKS[1])[2]
    return "\n\n".join([f"{head}{MARKS[0]}", *parts, f"{MARKS[1]}{tail}"])


if __name__ == "__main__":
    from specrl.config.schema import Config

    reference = Path(__file__).parents[2] / "docs" / "configuration.md"
    reference.write_text(updated_page(reference.read_text(encoding="utf-8"), Config), encoding="utf-8")
