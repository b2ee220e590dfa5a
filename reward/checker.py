"""math-verify, as it runs in a worker of the math reward."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product
from typing import Any

from math_verify import parse, verify
from sympy.core.random import seed


def make_checker() -> Callable[[dict[str, Any]], bool]:
    """A handler for `specrl.reward.math.Comparison` as a dict, which always answers the same input alike.

    The handler raises ValueError for a reference that math-verify cannot parse. math-verify's own timeouts are off:
    they are signal alarms, which its inner `except` clauses can swallow. The pool enforces the deadline instead.
    """
    for name in ("math_verify.parser", "math_verify.grader"):  # they warn that the timeouts are off
        logging.getLogger(name).setLevel(logging.ERROR)

    def handler(payload: dict[str, Any]) -> bool:
        seed(0)  # some of sympy's algorithms draw random numbers
        reference = parse(_boxed(payload["reference"]), parsing_timeout=None)
        if all(isinstance(item, str) for item in reference):  # text that math-verify could not parse
            raise ValueError(f"math-verify cannot read the reference answer {payload['reference']!r:.200}")
        answer = _boxed(payload["answer"]) if payload["marked"] else payload["answer"]
        candidates = _or([], parse, answer, parsing_timeout=None)
        pairs = product(reference, candidates)
        return any(_or(False, verify, *pair, timeout_seconds=None) for pair in pairs)

    handler({"reference": r"\frac{1}{2}", "answer": "0.5", "marked": True})  # grammars load on first use
    return handler


def _boxed(answer: str) -> str:
    return rf"\boxed{{{answer}}}"


def _or(default: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The function's result, or `default` when math-verify cannot read or compare the arguments.

    Running out of memory is no verdict and is raised, which is why math-verify must not handle its errors itself.
    """
    try:
        return function(*arguments, **options, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:
        return default
