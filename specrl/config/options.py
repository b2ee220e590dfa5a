"""`key=value` command lines and YAML files as objects of an options dataclass, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import yaml

from specrl.rollout.checks import Option, options, plain, sections, suggestion

T = TypeVar("T")
COMMAND_WORDS = ("help", "config", "dry_run")
"""Words of a command line that are no options."""


class ConfigError(ValueError):
    """What the user asked for cannot be done. One line per problem: what, why, the value given, the remedy."""


def parse(argv: Iterable[str]) -> dict[str, str]:
    """A command line of `key=value` words as a dict of texts; `--help` counts as `help=true`."""
    texts: dict[str, str] = {}
    for word in argv:
        key, equals, value = ("help", "=", "true") if word in ("-h", "--help") else word.partition("=")
        if key.startswith("-"):
            form = f"{key.lstrip('-').replace('-', '_')}={value or 'VALUE'}"
            raise ConfigError(f"Options have no dashes: write {form} instead of {word}.")
        if not equals or not key:
            raise ConfigError(f"'{word}' is not key=value. Every word has that form, without spaces: config=grpo_math.")
        if key in texts:
            raise ConfigError(f"{key} is given twice, as {texts[key]} and as {value}. Keep one.")
        texts[key] = value
    return texts


def read_yaml(text: str, source: str) -> Any:
    """YAML as dicts, lists and texts, as the option decides what `no`, `off` or `007` mean. Errors name `source`."""
    try:
        return yaml.load(text, yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", error))
        raise ConfigError(f"{source}{line}: {' '.join(problem.split())}.") from error


def read_file(path: Path, schema: type) -> dict[str, Any]:
    """A YAML file as a dict from dotted keys to texts, lists and mappings."""
    try:
        tree = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"Cannot read {path}: {reason}.") from error
    return dict(_flatten(tree, str(path), sections(schema)))


def _flatten(tree: Any, source: str, known: Iterable[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree or {}, dict):
        section = prefix.rstrip(".") or "the file"
        raise ConfigError(f"{source}: expected options below {section}, as in 'key: value', not {plain(tree)}.")
    for name, value in (tree or {}).items():
        key = f"{prefix}{name}"
        if key in known:
            yield from _flatten(value, source, known, f"{key}.")
        else:
            yield key, value


def build(schema: type[T], *layers: tuple[str, Mapping[str, Any]]) -> T:
    """A `schema` object from its defaults and layers of (source, {dotted key: text, list or mapping}); later ones win.

    Raises:
        ConfigError: an unknown key (with the nearest known one), or a value of the wrong type.
    """
    known = options(schema)
    config = schema()
    for source, layer in layers:
        for key, text in layer.items():
            if key not in known:
                raise ConfigError(source + _unknown(key, known, sections(schema)))
            option = known[key]
            if option.container and isinstance(text, str):
                text = read_yaml(text, key)
            try:
                value = option.parse(text)
            except ValueError as error:
                raise ConfigError(source + option.refusal(text, plain(text))) from error
            section, _, name = key.rpartition(".")
            setattr(attrgetter(section)(config) if section else config, name, value)
    return config


def _unknown(key: str, known: Mapping[str, Option], groups: Iterable[str]) -> str:
    if key in groups:
        return f"'{key}' is a section; set its options one by one. help={key} lists them."
    if near := suggestion(key, [*groups, *known, *COMMAND_WORDS]):
        return f"Unknown option '{key}'.{near}"
    if top := [name for name in groups if "." not in name]:
        return f"Unknown option '{key}'. The sections are {', '.join(top)}; help=SECTION lists the options of one."
    return f"Unknown option '{key}'. The options are {', '.join(known)}."


def to_yaml(config: Any, changed: bool = False) -> str:
    """A config as YAML that `read_file` and `build` turn into an equal object. changed: without default values."""
    tree: dict[str, Any] = {}
    for key, option in options(type(config)).items():
        value = attrgetter(key)(config)
        if changed and value == option.default:
            continue
        *above, name = key.split(".")
        node = tree
        for section in above:
            node = node.setdefault(section, {})
        node[name] = value
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
