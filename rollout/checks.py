"""The options of a dataclass, and the checks of their values that the command line and the library share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from configparser import ConfigParser
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from specrl.rollout.config import RolloutConfig
from specrl.rollout.types import RolloutError

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
FLAGS = ConfigParser.BOOLEAN_STATES
READERS: dict[Any, Callable] = {int: int, float: float, bool: lambda text: FLAGS[text.lower()], str: str}


@dataclass(frozen=True)
class Option:
    """A field of an options dataclass or of one of its sections, with what `doc` says about it."""

    key: str
    """Dotted name, such as rollout.cache.max_mb."""
    type: Any
    default: Any
    help: str = ""
    limits: tuple[float, float] = (0, math.inf)
    """The smallest and the largest legal number."""
    only: str = ""

    @property
    def is_section(self) -> bool:
        return is_dataclass(self.type)

    @property
    def container(self) -> Any:
        """list, dict, or None for a single value."""
        return origin if (origin := get_origin(self.type)) in (list, dict) else None

    @property
    def members(self) -> tuple[Any, ...]:
        """The types that a value, or an item of a list or mapping, may have."""
        return get_args(self.type) if get_origin(self.type) in (Union, list, dict) else (self.type,)

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(word for member in self.members if get_origin(member) is Literal for word in get_args(member))

    def fits(self, value: Any) -> bool:
        """Whether a Python value has one of the option's types."""
        items: Sequence[Any] = [value]
        if self.container is list:
            items = value if isinstance(value, list | tuple) else [None]
        elif self.container is dict:
            items = [*value, *value.values()] if isinstance(value, dict) else [None]
        return all(any(_is(item, member) for member in self.members) for item in items)

    def parse(self, text: Any) -> Any:
        """The value that a text means, or a list or mapping of texts. Raises ValueError for another type."""
        if self.container is list and isinstance(text, list):
            return [self._parse(item) for item in text]
        if self.container is dict and self.fits(text) and all(text.values()):  # `{a:b}` names a variable without value
            return text
        if self.container:
            raise ValueError(f"{text!r} is no {self.container.__name__}")
        return self._parse(text)

    def _parse(self, text: Any) -> Any:
        if not isinstance(text, str):
            raise ValueError(f"{text!r} is no text")
        if text in self.choices:
            return text
        for kind in self.members:
            with suppress(KeyError, ValueError):  # a Literal has no reader
                return READERS[kind](text)
        raise ValueError(f"{text!r} has none of the types {self.members}")

    def refusal(self, value: Any, shown: str) -> str:
        """The message for a value of another type. shown: the value as its author wrote it."""
        if self.container is list:
            example = value if isinstance(value, str) and value else "a,b"
            return f"{self.key}={shown}: expected a list. Try {self.key}=[{example.strip('[]')}]."
        if self.container is dict:
            return f"{self.key}={shown}: expected names with values. Try '{self.key}={{name: value}}'."
        words = [WORDS[member] for member in self.members if member in WORDS]
        expected = " or ".join([*words, *self.choices]) if words else f"one of {', '.join(self.choices)}"
        return f"{self.key}={shown}: expected {expected}.{suggestion(str(value).lower(), self.choices)}"

    def outside(self, value: Any) -> Iterator[str]:
        """The message for a number outside the limits, if the value is one."""
        low, high = self.limits
        if _is(value, float) and not (low <= value <= high and math.isfinite(value)):
            near = min(max(value, low), high) if math.isfinite(value) else low
            limit = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            yield f"{self.key}={value} must be {limit}. Try {self.key}={near}."


def _is(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def walk(schema: type, prefix: str = "", only: str = "") -> Iterator[Option]:
    """Every field below a dataclass in the order of declaration, each section before its options.

    Options without `only` take that of their section.
    """
    kinds = get_type_hints(schema)
    for field in fields(schema):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        metadata = {**field.metadata, "only": field.metadata.get("only") or only}
        option = Option(prefix + field.name, kinds[field.name], default, **metadata)
        yield option
        if option.is_section:
            yield from walk(option.type, f"{option.key}.", option.only)


def options(schema: type) -> dict[str, Option]:
    """Every option below a dataclass, by key."""
    return {option.key: option for option in walk(schema) if not option.is_section}


def sections(schema: type) -> dict[str, str]:
    """The description of every section below a dataclass, by key."""
    return {option.key: option.help for option in walk(schema) if option.is_section}


def values(config: Any) -> dict[str, Any]:
    """The values of a dataclass object, by key."""
    return {key: attrgetter(key)(config) for key in options(type(config))}


def misfits(config: Any, prefix: str = "") -> list[str]:
    """Messages for values of a wrong type or, if there are none, for numbers outside their limits."""
    wrong: list[str] = []
    outside: list[str] = []
    for option in walk(type(config), prefix):
        value = attrgetter(option.key.removeprefix(prefix))(config)
        if option.is_section:
            if not isinstance(value, option.type):
                return [f"{option.key} is {value!r:.60}. Give a {option.type.__name__}."]
        elif option.fits(value):
            outside += option.outside(value)
        else:
            wrong.append(option.refusal(value, f"{value!r:.60}"))
    return wrong or outside


def broken_rules(config: Any, prefix: str = "") -> list[str]:
    """Messages of the `problems` of each section of a config without misfits."""
    shown = {prefix + key: value for key, value in values(config).items()}
    parts = [config, *(attrgetter(key)(config) for key in sections(type(config)))]
    return [filled(message, shown) for part in parts if hasattr(part, "problems") for message in part.problems()]


def filled(message: str, shown: Mapping[str, Any]) -> str:
    """A message with `key=value` for each `<key>` of an option."""
    keys = "|".join(map(re.escape, shown))
    return re.sub(f"<({keys})>", lambda match: f"{match[1]}={plain(shown[match[1]])}", message)


def check(config: RolloutConfig) -> None:
    """Raises RolloutError for the first option that the command line would refuse too."""
    for problem in misfits(config, "rollout.") or broken_rules(config, "rollout."):
        raise RolloutError(problem)


def plain(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, bool) or value is None:
        return str(value).lower().replace("none", "null")
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {plain(item)}' for name, item in value.items())}}}"
    return f"[{','.join(map(plain, value))}]" if isinstance(value, list) else str(value)


def suggestion(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the known word that is most like `word`, or "" if none is.

    A dash counts as an underscore (dry-run), and the initials of the last part as its abbreviation (lr).
    """
    known = list(known)
    word = word.replace("-", "_")
    section, _, leaf = word.rpartition(".")
    ordered = sorted(known, key=lambda key: key.rpartition(".")[0] != section)  # those of the same section first
    leaves = {key.rpartition(".")[2]: key for key in reversed(ordered)}
    initials = {"".join(part[:1] for part in name.split("_")): key for name, key in reversed(leaves.items())}
    if leaf in leaves:
        near = [leaves[leaf]]
    elif len(leaf) > 1 and leaf in initials:
        near = [initials[leaf]]
    else:
        near = get_close_matches(word, known, 1) or [leaves[match] for match in get_close_matches(leaf, leaves, 1)]
    return f" Did you mean '{near[0]}'?" if near else ""
