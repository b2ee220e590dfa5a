"""What a RolloutConfig may hold. The command line and the library ask here, so that every limit stands once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rollout.config import SOURCES, RolloutConfig
from rollout.types import RolloutError

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
Limits = tuple[float, float]
"""A closed range."""
UNLIMITED: Limits = (0, math.inf)
"""That of a number whose field names no limit."""


def limits(schema: type, prefix: str = "") -> dict[str, Limits]:
    """The closed ranges that the fields of a dataclass name, by dotted key."""
    found: dict[str, Limits] = {}
    kinds = get_type_hints(schema)
    for field in fields(schema):
        if is_dataclass(kinds[field.name]):
            found |= limits(kinds[field.name], f"{prefix}{field.name}.")
        elif "limits" in field.metadata:
            found[prefix + field.name] = field.metadata["limits"]
    return found


def outside(key: str, value: float, limits: Limits) -> Iterator[str]:
    """The sentence about a number that is not within its limits, if it is not."""
    low, high = limits
    if not (low <= value <= high and math.isfinite(value)):
        near = min(max(value, low), high) if math.isfinite(value) else low
        limit = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        yield f"{key}={value} must be {limit}. Try {key}={near}."


def rules(config: RolloutConfig) -> Iterator[str]:
    """Values within their limits that are of no use."""
    if config.top_p == 0:
        yield "rollout.top_p=0 keeps no token. Try rollout.top_p=1, which keeps all."
    if config.lenience == 0:
        yield "rollout.lenience=0 accepts nothing. Try rollout.lenience=1, or rollout.law=off."
    for name in config.sources:
        if name not in SOURCES:
            near = (get_close_matches(name, SOURCES, 1, cutoff=0) or SOURCES)[0]
            yield f"rollout.sources has {name!r}, which is none of {', '.join(SOURCES)}. Did you mean {near}?"


def check(config: RolloutConfig) -> None:
    """Raises RolloutError for the first value that the command line would refuse too, by itself."""
    for problem in (*_problems(config, "rollout."), *rules(config)):
        raise RolloutError(problem)


def _problems(config: Any, prefix: str) -> Iterator[str]:
    kinds, ranges = get_type_hints(type(config)), limits(type(config))
    for field in fields(config):
        key, value, kind = prefix + field.name, getattr(config, field.name), kinds[field.name]
        if is_dataclass(kind):
            yield from (
                _problems(value, f"{key}.")
                if isinstance(value, kind)
                else [f"{key} is {value!r:.60}. Give a {kind.__name__}."]
            )
        elif not any(_fits(value, member) for member in _members(kind)):
            raise RolloutError(_refusal(key, value, kind))  # what follows compares values of the right kind
        elif isinstance(value, Real) and not isinstance(value, bool):
            yield from outside(key, value, ranges.get(field.name, UNLIMITED))


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Union else (kind,)


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def _refusal(key: str, value: Any, kind: Any) -> str:
    if get_origin(kind) is list:
        return f"{key}={value!r:.60} is no list of texts. Try {key}={[value] if isinstance(value, str) else []}."
    choices = [word for member in _members(kind) if get_origin(member) is Literal for word in get_args(member)]
    expected = [*(WORDS[member] for member in _members(kind) if member in WORDS), *choices]
    near = get_close_matches(str(value).lower(), choices, 1)
    return f"{key}={value!r:.60}: expected {' or '.join(expected)}." + (f" Did you mean {near[0]!r}?" if near else "")
