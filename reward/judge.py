"""Runs the tests of a row against a program in another process. The standard library only: this runs in the sandbox."""

from __future__ import annotations

import ast
import json
import sys
import unittest
from contextlib import suppress
from math import isclose
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrl.reward.remote import Peer

MODULES = "solution", "main", "your_module"
"""Names by which tests import the program."""


def judged(tests: dict[str, Any], peer: Peer) -> dict[str, Any]:
    """{"passed": bool}, or {"unsupported": why} for tests that say nothing about the program.

    Args: tests: `source`, or `function` and `calls`, as UnitTests has them.
    """
    from remote import Unsupported  # type: ignore[import-not-found]  # beside this file in the sandbox

    try:
        solution = peer.module()
        for name in MODULES:
            sys.modules[name] = solution
        if tests["calls"]:
            return {"passed": _called(solution, tests["function"], tests["calls"])}
        _tested(solution, tests["source"])
    except (Unsupported, ModuleNotFoundError) as error:
        return {"passed": False} if hasattr(error, "of_program") else {"unsupported": str(error)}
    except (Exception, SystemExit):
        return {"passed": False}
    return {"passed": True}


def _called(solution: ModuleType, name: str, calls: list[Any]) -> bool:
    """Whether the function, or the method of a class Solution, returns what is wanted."""
    owner: Any = solution if hasattr(solution, name) else solution.Solution()
    return all(returned(getattr(owner, name)(*map(int_keys, given)), wanted) for given, wanted in calls)


def int_keys(value: Any) -> Any:
    """A dictionary whose keys are numbers, which JSON writes as text; the judges of APPS and TACO read them so."""
    if isinstance(value, dict) and value and all(key.removeprefix("-").isdecimal() for key in value):
        return {int(key): part for key, part in value.items()}
    return value


def returned(found: Any, wanted: Any) -> bool:
    """Whether a returned value is the wanted one, as JSON has it; some data sets have the wanted one in a list."""
    try:
        found = json.loads(json.dumps(found, default=lambda value: value._plain()))
    except (TypeError, ValueError, AttributeError):
        return False
    return same(found, wanted) or (isinstance(wanted, list) and len(wanted) == 1 and same(found, wanted[0]))


def same(found: Any, wanted: Any) -> bool:
    """Equality of JSON values, of floats up to rounding."""
    if isinstance(wanted, float) and isinstance(found, int | float) and not isinstance(found, bool):
        return isclose(found, wanted, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, dict):
        equal_keys = isinstance(found, dict) and found.keys() == wanted.keys()
        return equal_keys and all(same(found[key], wanted[key]) for key in wanted)
    return found == wanted and isinstance(found, bool) == isinstance(wanted, bool)


def _tested(solution: ModuleType, source: str) -> None:
    """Runs the tests' code, test functions, and the methods of test classes; raises where one fails."""
    from remote import load

    tree = ast.parse(source)
    tree.body = [node for node in tree.body if ast.unparse(node) != "unittest.main()"]  # its classes are run below
    with open("/tmp/tests.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(ast.unparse(tree))
    tests = load("tests", "/tmp/tests.py", vars(solution))
    for node in tree.body:
        value = getattr(tests, getattr(node, "name", ""), None)
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            for test in unittest.defaultTestLoader.loadTestsFromTestCase(value):
                with suppress(unittest.SkipTest):
                    unittest.TestSuite([test]).debug()
        elif isinstance(value, type) and value.__name__.startswith("Test"):
            for method in [name for name in vars(value) if name.startswith("test")]:
                getattr(value(), method)()
        elif callable(value) and isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            value()
