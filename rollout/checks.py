"""What the fields of an options dataclass may hold: the command line and the library ask here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from specrl.rollout.config import RolloutConfig
from specrl.rollout.types import RolloutError

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Option:
    """One leaf of an options dataclass, named by its dotted key."""

    key: str
    type: Any
    default: Any
    metadata: Mapping[str, Any]
    """What `sections.doc` says of it; what a section says holds for its options, unless they say otherwise."""

    @property
    def help(self) -> str:
        return self.metadata.get("help", "")

    @property
    def limits(self) -> tuple[float, float]:
        """The closed range of a number."""
        return self.metadata.get("limits", (0, math.inf))

    @property
    def is_list(self) -> bool:
        return get_origin(self.type) is list

    @property
    def is_mapping(self) -> bool:
        return get_origin(self.type) is dict

    @property
    def members(self) -> tuple[Any, ...]:
        """The types a value may have: those of a union, else one."""
        return get_args(self.type) if get_origin(self.type) is Union else (self.type,)

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(word for member in self.members if get_origin(member) is Literal for word in get_args(member))

    def fits(self, value: Any) -> bool:
        """Whether the value has a type that the option may have."""
        if self.is_list:
            return isinstance(value, list | tuple) and all(_is(item, get_args(self.type)[0]) for item in value)
        if self.is_mapping:
            return isinstance(value, dict) and all(isinstance(word, str) for pair in value.items() for word in pair)
        return any(_is(value, member) for member in self.members)

    def refusal(self, value: Any, shown: str) -> str:
        """The message for a value that does not fit. shown: as its author wrote it."""
        if self.is_list:
            example = value if isinstance(value, str) and value else "a,b"
            return f"{self.key}={shown}: expected a list. Try {self.key}=[{example.strip('[]')}]."
        if self.is_mapping:
            return f"{self.key}={shown}: expected names with values. Try '{self.key}={{name: value}}'."
        words = [WORDS[member] for member in self.members if member in WORDS]
        expected = " or ".join([*words, *self.choices]) if words else f"one of {', '.join(self.choices)}"
        return f"{self.key}={shown}: expected {expected}.{suggestion(str(value).lower(), self.choices)}"

    def outside(self, value: Any) -> Iterator[str]:
        """The sentence about a number that is not within its limits, if it is not."""
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


def _members(schema: type) -> Iterator[tuple[str, Any, Any]]:
    kinds = get_type_hints(schema)
    return ((field.name, kinds[field.name], field) for field in fields(schema))


def options(schema: type, prefix: str = "", inherited: Mapping[str, Any] | None = None) -> dict[str, Option]:
    """Every leaf below a dataclass in the order of declaration, by dotted key."""
    found: dict[str, Option] = {}
    for name, kind, field in _members(schema):
        said = {**(inherited or {}), **field.metadata}
        if is_dataclass(kind):
            found |= options(kind, f"{prefix}{name}.", {key: said[key] for key in ("resume", "only") if key in said})
        else:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            found[prefix + name] = Option(prefix + name, kind, default, said)
    return found


def sections(schema: type, prefix: str = "") -> dict[str, str]:
    """Every nested dataclass with its one-line documentation, by dotted key."""
    found: dict[str, str] = {}
    for name, kind, field in _members(schema):
        if is_dataclass(kind):
            found |= {prefix + name: field.metadata.get("help", ""), **sections(kind, f"{prefix}{name}.")}
    return found


def values(config: Any) -> dict[str, Any]:
    """The values of a dataclass object, by dotted key."""
    return {key: attrgetter(key)(config) for key in options(type(config))}


def misfits(config: Any, prefix: str = "") -> list[str]:
    """Values of another type than their option's; where there are none, numbers outside their limits."""
    for name, kind, _ in _members(type(config)):
        if is_dataclass(kind) and not isinstance(value := getattr(config, name), kind):
            return [f"{prefix}{name} is {value!r:.60}. Give a {kind.__name__}."]
    known = options(type(config), prefix)
    held = [(known[prefix + key], value) for key, value in values(config).items()]
    wrong = [option.refusal(value, f"{value!r:.60}") for option, value in held if not option.fits(value)]
    return wrong or [sentence for option, value in held for sentence in option.outside(value)]


def broken_rules(config: Any) -> list[str]:
    """What each section that has `problems` says of its own options, which all fit."""
    parts = [config, *(attrgetter(key)(config) for key in sections(type(config)))]
    return [sentence for part in parts if hasattr(part, "problems") for sentence in part.problems()]


def check(config: RolloutConfig) -> None:
    """Raises RolloutError for the first thing that the command line would refuse too."""
    for problem in misfits(config, "rollout.") or broken_rules(config):
        raise RolloutError(problem)


def suggestion(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the known word nearest to `word`, by last part or as a whole; empty when none is.

    A dash counts as an underscore, as in dry-run, and the initials of a last part as its abbreviation, as in lr.
    """
    known, word = list(known), word.replace("-", "_")
    section, _, leaf = word.rpartition(".")
    ordered = sorted(known, key=lambda key: key.rpartition(".")[0] != section)  # those of the section named first
    leaves = {key.rpartition(".")[2]: key for key in reversed(ordered)}
    initials = {"".join(part[:1] for part in name.split("_")): key for name, key in reversed(leaves.items())}
    if leaf in leaves:
        near = [leaves[leaf]]
    elif len(leaf) > 1 and leaf in initials:
        near = [initials[leaf]]
    else:
        near = get_close_matches(word, known, 1) or [leaves[match] for match in get_close_matches(leaf, leaves, 1)]
    return f" Did you mean '{near[0]}'?" if near else ""
