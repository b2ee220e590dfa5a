"""`key=value` command lines and YAML files as objects of an options dataclass, and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from specrl.rollout.checks import Option, options, plain, sections, suggestion, values

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


class _TextLoader(yaml.SafeLoader):
    """Safe YAML whose scalars stay text, as the type of the option decides what `no`, `off` or `007` mean.

    Aliases are refused because they can make a short file endless, and tags because they would decide the type.
    """

    yaml_implicit_resolvers: ClassVar[dict] = {}

    def compose_node(self, parent, index):
        event = self.peek_event()
        problem = ""
        if isinstance(event, yaml.AliasEvent):
            problem = "aliases such as *name are not supported"
        elif event.tag is not None:
            problem = f"tags such as {event.tag} are not supported; the option decides the type"
        elif isinstance(event, yaml.ScalarEvent) and re.search("[\ud800-\udfff]", event.value):
            problem = "half of a surrogate pair is no text"
        if problem:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_TextLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$"), ["~", "n", ""])


def read_yaml(text: str, source: str) -> Any:
    """YAML as dicts, lists, texts and None. `source` is named in errors."""
    try:
        return yaml.load(text, _TextLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{source}, line {mark.line + 1}: {error.problem}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}.") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply; options have four levels.") from error


def read_file(path: Path, schema: type) -> dict[str, Any]:
    """A YAML file as a dict from dotted keys to texts, lists and mappings."""
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
        section = prefix.rstrip(".") or "the file"
        raise ConfigError(f"{source}: expected options below {section}, as in 'key: value', not {plain(tree)}.")
    for name, value in (tree or {}).items():
        key = f"{prefix}{name}"
        if key in known:
            yield from _flatten(value, source, known, f"{key}.")
        else:
            yield key, value


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A dict by dotted keys as a tree; the reverse of `_flatten`."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *above, name = key.split(".")
        node = tree
        for section in above:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def build(schema: type[T], *layers: tuple[str, Mapping[str, Any]]) -> T:
    """A `schema` object from its defaults and layers of (source, {dotted key: text, list or mapping}); later ones win.

    Values may use OmegaConf interpolation, such as ${oc.env:HOME}; \\${ is a literal ${.

    Raises:
        ConfigError: an unknown key (with the nearest known one), or a value of the wrong type.
    """
    known = options(schema)
    chosen: dict[str, Any] = {}
    for source, layer in layers:
        for key, text in layer.items():
            if key not in known:
                raise ConfigError(source + _unknown(key, known, sections(schema)))
            if known[key].container and isinstance(text, str):
                text = read_yaml(text, key)
            chosen[key] = text if "${" in str(text) else _parsed(known[key], text, source)
    for key, text in _interpolated(schema, chosen).items():
        chosen[key] = _parsed(known[key], text)
    config = schema()
    for key, value in chosen.items():
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(config) if section else config, name, value)
    return config


def _parsed(option: Option, text: Any, source: str = "") -> Any:
    try:
        return option.parse(text)
    except ValueError as error:
        raise ConfigError(source + option.refusal(text, plain(text))) from error


def _interpolated(schema: type, chosen: dict[str, Any]) -> dict[str, Any]:
    """The values that contain `${`, as texts, after OmegaConf has replaced it."""
    affected = [key for key, value in chosen.items() if "${" in str(value)]
    if not affected:
        return {}
    from omegaconf import OmegaConf  # slow to import, and rarely needed
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = OmegaConf.create(_nested(values(schema()) | chosen))
        resolved = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key}: {reason}. Write \\${{ for a literal ${{.") from error
    flat = dict(_flatten(resolved, "", sections(schema)))
    return {key: _mapped(plain, flat[key]) for key in affected}


def _unknown(key: str, known: Mapping[str, Option], groups: Iterable[str]) -> str:
    if meant := [name for name, option in known.items() if key in option.also]:
        return f"Unknown option '{key}'. Did you mean '{meant[0]}'?"
    if key in groups:
        return f"'{key}' is a section; set its options one by one. help={key} lists them."
    if near := suggestion(key, [*groups, *known, *COMMAND_WORDS]):
        return f"Unknown option '{key}'.{near}"
    if top := [name for name in groups if "." not in name]:
        return f"Unknown option '{key}'. The sections are {', '.join(top)}; help=SECTION lists the options of one."
    return f"Unknown option '{key}'. The options are {', '.join(known)}."


def to_yaml(config: Any, changed: bool = False) -> str:
    """A config as YAML that `read_file` and `build` turn into an equal object. changed: without default values."""
    flat = values(config)
    if changed:
        flat = {key: flat[key] for key, option in options(type(config)).items() if flat[key] != option.default}
    return yaml.safe_dump(_mapped(_escaped, _nested(flat)), sort_keys=False, allow_unicode=True, width=120)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The result of the function for a value, or for each value in a tree of dicts and lists."""
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(function, item) for item in value]
    return function(value)


def _escaped(value: Any) -> Any:
    """A text with each `${` marked as literal."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
