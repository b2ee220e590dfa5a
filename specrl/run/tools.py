"""Functions that the policy may call as tools, given as module:function, and a calculator."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from specrl.config.options import ConfigError, plain
from specrl.rollout.checks import suggestion


def calculate(expression: str) -> int:
    """Calculates a sum, a difference or a product of two whole numbers.

    Args:
        expression: such as 12 + 30.

    Returns: the result.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*", expression)
    if not match:
        raise ValueError(f"{expression[:40]!r} is not two whole numbers with +, - or * between them")
    left, right = int(match[1]), int(match[3])
    return {"+": left + right, "-": left - right, "*": left * right}[match[2]]


calculate.deterministic = True  # type: ignore[attr-defined]  # a call with the same arguments keeps its result


@cache
def load_tools(names: tuple[str, ...]) -> tuple[tuple[Callable, ...], list[dict[str, Any]]]:
    """The functions of `dataset.tools` and their schemas. Raises ConfigError, in one line."""
    from transformers.utils import get_json_schema

    functions, schemas = [], []
    for name in names:
        function = _find(name)
        try:
            schemas.append(get_json_schema(function))
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"dataset.tools: {name} cannot be described to the model: {reason}. Give each argument a type and a "
                "line under Args: in the docstring."
            ) from error
        functions.append(function)
    if len({function.__name__ for function in functions}) < len(functions):
        raise ConfigError(f"dataset.tools={plain([*names])} has a name twice. The model calls tools by their names.")
    return tuple(functions), schemas


def _find(name: str) -> Callable:
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise ConfigError(f"dataset.tools: {name} is not module:function, such as specrl.run.tools:calculate.")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"dataset.tools: module {module_name} cannot be imported: {reason}.") from error
    if not hasattr(module, attribute):
        near = suggestion(attribute, dir(module))
        raise ConfigError(f"dataset.tools: module {module_name} has no function {attribute}.{near}")
    function = getattr(module, attribute)
    if not inspect.isfunction(function):
        raise ConfigError(f"dataset.tools: {name} must be a function, but it is {type(function).__name__}.")
    return function
