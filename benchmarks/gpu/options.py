"""`key=value` words without OmegaConf, which a bare machine lacks: by the option tables that every command has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specrl.rollout.checks import Option, options, suggestion
from specrl.rollout.sections import doc


class OptionError(Exception):
    """A word of the command line is wrong. The message names it and the nearest right one."""


@dataclass
class Options:
    out: str = doc("", "write the figures to this JSON file, after every measurement")
    small: bool = doc(False, "tiny sizes: every phase on any machine, in a minute or two; its figures mean nothing")
    phases: str = doc("", "only these, by number or name: 0,1,pass; empty runs all")
    seconds: int = doc(500, "what all phases together may take; what is left of a phase then is not begun", low=1)
    device: Literal["auto", "cpu", "cuda"] = doc("auto", "where to measure; auto takes cuda where there is one")


def parse(words: Sequence[str]) -> Options:
    """The options of a command line.

    Raises:
        OptionError: a word is no `key=value`, its key is unknown, or its value does not fit.
    """
    known, found = options(Options), {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise OptionError(f"{word!r} is no key=value.{suggestion(key, known)}")
        if key not in known:
            nearest = suggestion(key, known) or f" There are {', '.join(known)}."
            raise OptionError(f"unknown option {key!r}.{nearest}")
        value = _value(known[key], text)
        for problem in known[key].outside(value):
            raise OptionError(problem)
        found[key] = value
    if not found.get("out"):
        raise OptionError("out= is missing: where the figures go. Try out=gpu.json.")
    return Options(**found)


def _value(option: Option, text: str) -> Any:
    """What the text means for the option, by its type."""
    words = {"true": True, "false": False}
    try:
        if option.type is bool:
            return words[text.lower()]
        value = text if option.choices else option.type(text)
    except (KeyError, ValueError):
        value = None
    if value is None or not option.fits(value):
        raise OptionError(option.refusal(text, text))
    return value
