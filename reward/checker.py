"""math-verify, as a worker of the math reward runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product
from typing import Any

from math_verify import parse, verify
from sympy.core.random import seed


def make_checker() -> Callable[[dict[str, Any]], bool]:
    """math-verify as handler({"reference", "answer", "marked"}) -> bool, the same for the same input.

    Raises ValueError for a reference in which nothing can be parsed. math-verify's own timeouts are off: they are
    signal alarms, which its inner `except` clauses can swallow; the pool's deadline holds from outside.
    """
    for name in ("math_verify.parser", "math_verify.grader"):  # they warn that the timeouts are off
        logging.getLogger(name).setLevel(logging.ERROR)

    def handler(payload: dict[str, Any]) -> bool:
        seed(0)  # some of sympy's algorithms draw from this generator
        reference = parse(rf"\boxed{{{payload['reference']}}}", parsing_timeout=None)
        if all(isinstance(item, str) for item in reference):  # text that math-verify could not read
            raise ValueError(f"math-verify cannot read the reference answer {payload['reference']!r:.200}")
        text = rf"\boxed{{{payload['answer']}}}" if payload["marked"] else payload["answer"]
        pairs = product(reference, _or([], parse, text, parsing_timeout=None))
        return any(_or(False, verify, *pair, timeout_seconds=None) for pair in pairs)

    handler({"reference": r"\frac{1}{2}", "answer": "0.5", "marked": True})  # grammars load on first use
    return handler


def _or(otherwise: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What math-verify says; `otherwise` of what it cannot read or compare."""
    try:
        return function(*arguments, **options, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:
        return otherwise
