"""`key=value` command lines and YAML files over typed dataclasses. Knows the shape of options, not specrl's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specrl.rollout.checks import Option, options, sections, suggestion

T = TypeVar("T")
COMMAND_WORDS = ("config", "dry_run", "help")
"""Words of a command line that are no options."""
DEEPEST = 20
"""Levels of a YAML file; options have four."""


class ConfigError(ValueError):
    """What the user asked for cannot be done as asked. One line per problem: what, why, the value given, the remedy."""


def parse(argv: Iterable[str]) -> dict[str, str]:
    """A command line of `key=value` words as a dict of texts; `--help` counts as `help=true`."""
    given: dict[str, str] = {}
    for word in argv:
        key, equals, value = ("help", "=", "true") if word in ("-h", "--help") else word.partition("=")
        if key.startswith("-"):
            form = f"{key.lstrip('-').replace('-', '_')}={value or 'VALUE'}"
            raise ConfigError(f"Options have no dashes: write {form} instead of {word}.")
        if not equals or not key:
            raise ConfigError(f"'{word}' is not key=value. Every word has that form, without spaces: config=grpo_math.")
        if key in given:
            raise ConfigError(f"{key} is given twice, as {given[key]} and as {value}. Keep one.")
        given[key] = value
    return given


class _Text(yaml.SafeLoader):
    """Safe YAML whose plain scalars stay text: the option's type decides what `no`, `off` or `007` mean.

    Aliases are refused, because they can make a short file endless; so are tags, which would decide the type, and what
    is nested deeper than any option.
    """

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012
    _depth = 0

    def compose_node(self, parent, index):
        event = self.peek_event()
        problem = ""
        if isinstance(event, yaml.AliasEvent):
            problem = "aliases such as *name are not supported"
        elif event.tag is not None:
            problem = f"tags such as {event.tag} are not supported; the option decides the type"
        elif self._depth > DEEPEST:
            problem = f"nothing is nested deeper than {DEEPEST} levels"
        elif isinstance(event, yaml.ScalarEvent) and re.search("[\ud800-\udfff]", event.value):
            problem = "half of a surrogate pair is no text"
        if problem:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in seen:
                what = f"'{key.value}' is given twice" if isinstance(key, yaml.ScalarNode) else "a key must be a word"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Text.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$"), ["~", "n", ""])


def read_yaml(text: str, source: str) -> Any:
    """Parse YAML with safe types only. `source` is named in errors. Scalars come back as text."""
    try:
        return yaml.load(text, _Text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{source}, line {mark.line + 1}: {error.problem}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}.") from error


def read_file(path: Path, schema: type) -> dict[str, Any]:
    """A YAML file as a dict from dotted keys to texts and lists."""
    try:
        tree = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"Cannot read {path}: {reason}.") from error
    flat: dict[str, Any] = {}
    for key, value in _flatten(tree, str(path), sections(schema)):
        if key in flat:
            raise ConfigError(f"{path}: {key} is given twice. Keep one.")
        flat[key] = value
    return flat


def _flatten(tree: Any, source: str, known: Iterable[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree or {}, dict):
        where = prefix.rstrip(".") or "the file"
        raise ConfigError(f"{source}: expected options below {where}, as in 'key: value', not {plain(tree)}.")
    for name, value in (tree or {}).items():
        key = f"{prefix}{name}"
        if key in known:
            yield from _flatten(value, source, known, f"{key}.")
        else:
            yield key, value


def build(schema: type[T], *layers: tuple[str, dict[str, Any]]) -> T:
    """A `schema` object from its defaults and layers of (source, {dotted key: text or list}); later layers win.

    Values may use OmegaConf interpolation, such as ${oc.env:HOME}; \\${ is a literal ${.

    Raises:
        ConfigError: an unknown key (with the nearest known one), or a value of the wrong type.
    """
    node, known = OmegaConf.structured(schema), options(schema)
    for source, values in layers:
        for key, value in values.items():
            if key not in known:
                raise ConfigError(source + _unknown(key, known, sections(schema)))
            try:
                OmegaConf.update(node, key, _shaped(known[key], value), merge=False)
            except (OmegaConfBaseException, TypeError) as error:
                message = _interpolation(key, error) if "${" in str(value) else known[key].refusal(value, plain(value))
                raise ConfigError(source + message) from error
    try:
        return OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise ConfigError(_interpolation(error.full_key, error)) from error


def _shaped(option: Option, value: Any) -> Any:
    """Texts, flat lists and flat mappings of texts only: OmegaConf lets nested lists pass as list[str]."""
    if (option.is_list or option.is_mapping) and isinstance(value, str):
        value = read_yaml(value, option.key)
    if option.is_mapping:
        if not option.fits(value):
            raise TypeError(option.key)
        return value
    items = value if option.is_list and isinstance(value, list) else [value]
    if option.is_list != isinstance(value, list) or not all(isinstance(item, str) for item in items):
        raise TypeError(option.key)
    kinds = [kind for kind in (int, float) if kind in option.members]
    if option.choices and kinds and value not in option.choices:
        with suppress(ValueError):
            return kinds[0](value)  # OmegaConf converts no text for a union
    return value


def _interpolation(key: str | None, error: Exception) -> str:
    return f"{key}: {str(error).splitlines()[0]}. Write \\${{ for a literal ${{."


def _unknown(key: str, known: dict[str, Option], groups: Iterable[str]) -> str:
    if meant := next((name for name, option in known.items() if key in option.metadata.get("also", ())), ""):
        return f"Unknown option '{key}'. Did you mean '{meant}'?"
    if key in groups:
        return f"'{key}' is a section; set its options one by one. help={key} lists them."
    if near := suggestion(key, [*groups, *known, *COMMAND_WORDS]):
        return f"Unknown option '{key}'.{near}"
    if top := [name for name in groups if "." not in name]:
        return f"Unknown option '{key}'. The sections are {', '.join(top)}; help=SECTION lists the options of one."
    return f"Unknown option '{key}'. The options are {', '.join(known)}."


def plain(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, bool) or value is None:
        return str(value).lower().replace("none", "null")
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {plain(item)}' for name, item in value.items())}}}"
    return f"[{','.join(map(plain, value))}]" if isinstance(value, list) else str(value)


def to_yaml(config: Any) -> str:
    """A dataclass object as YAML that `read_file` and `build` turn into an equal object."""
    return yaml.safe_dump(_escape(asdict(config)), sort_keys=False, allow_unicode=True, width=120)


def changed_yaml(config: Any) -> str:
    """As `to_yaml`, without the options that have their defaults."""
    tree: dict[str, Any] = {}
    for key, option in options(type(config)).items():
        if (value := attrgetter(key)(config)) != option.default:
            *above, name = key.split(".")
            node = tree
            for section in above:
                node = node.setdefault(section, {})
            node[name] = value
    return yaml.safe_dump(_escape(tree), sort_keys=False, allow_unicode=True, width=120)


def _escape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
