"""The unit tests of a row, recognised by their form in the columns of data sets, and the program of a completion.

Nothing here runs what it reads.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markdown_it import MarkdownIt

TESTS = "tests", "test_list", "test", "test_cases", "unit_tests", "input_output"
"""Columns with tests in any form; else `inputs` and `outputs`."""
SETUP = "test_setup_code", "test_imports"
"""Columns with Python code that runs before the tests."""
FORMS = (
    "assertions, test functions, a unittest class, or check(candidate) with a column entry_point; a list of "
    "assertions; inputs and outputs, or a list of objects with input and output, of a program or, with fn_name, of a "
    "function; any of them also as JSON text"
)
NAMES = "fn_name", "func_name", "function_name"
PYTHON = "python", "python3", "py"


@dataclass(frozen=True)
class UnitTests:
    """What a program is asked. Exactly one of `source`, `pairs` and `calls` is not empty."""

    source: str = ""
    """Python code that raises where the program is wrong."""
    entry: str = ""
    """The function that `check` of the source gets."""
    pairs: tuple[tuple[str, str], ...] = ()
    """What a program reads, and what it has to print."""
    function: str = ""
    calls: tuple[tuple[list[Any], Any], ...] = ()
    """Arguments of the function, and what it has to return."""

    @property
    def needs(self) -> frozenset[str]:
        """Names of which a program has to define one."""
        if self.calls:
            return frozenset([self.function, "Solution"])
        return frozenset([self.entry]) if self.entry else _free_names(self.source)


def unit_tests(fields: Mapping[str, Any]) -> UnitTests:
    """The tests of a row.

    Raises:
        ValueError: there are none, they have no known form, or nothing in them can fail.
    """
    name = next((str(fields[column]) for column in NAMES if fields.get(column)), "")
    column = next((column for column in TESTS if fields.get(column)), None)
    if column is not None:
        value = fields[column]
    elif fields.get("inputs") and fields.get("outputs"):
        column = "inputs"
        value = {"inputs": fields["inputs"], "outputs": fields["outputs"]}
    else:
        raise ValueError(
            f"the code reward found no unit tests in the columns {', '.join(fields) or '(none)'}. It needs one of "
            f"{', '.join(TESTS)}, or inputs and outputs"
        )
    setup = "\n".join(line for key in SETUP if fields.get(key) for line in _lines(fields[key]))
    try:
        return _recognised(_decoded(value), name, str(fields.get("entry_point") or ""), setup)
    except (ValueError, SyntaxError, KeyError) as error:
        raise ValueError(f"the tests in column {column} cannot be run: {error}. Known forms: {FORMS}") from None


def _decoded(value: Any) -> Any:
    """Text that holds data as data: JSON, or a list as Python writes it; other text as it is."""
    text = value.strip() if isinstance(value, str) else ""
    if text[:1] not in ("[", "{"):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return value


def _recognised(value: Any, name: str, entry: str, setup: str) -> UnitTests:
    if isinstance(value, str):
        return _source([value], entry, setup)
    if isinstance(value, Sequence) and value and all(isinstance(part, str) for part in value):
        return _source(value, entry, setup)
    if isinstance(value, Sequence) and value and all(isinstance(part, Mapping) for part in value):
        name = name or next((str(part[key]) for part in value for key in NAMES if part.get(key)), "")
        pairs = [(part["input"], part["output"]) for part in value]
    elif isinstance(value, Mapping) and {"inputs", "outputs"} <= value.keys():
        name = name or next((str(value[key]) for key in NAMES if value.get(key)), "")
        inputs = _decoded(value["inputs"])
        outputs = _decoded(value["outputs"])
        if not inputs or isinstance(inputs, str) or isinstance(outputs, str) or len(inputs) != len(outputs):
            raise ValueError("inputs and outputs must be lists of equal length")
        pairs = list(zip(inputs, outputs, strict=True))
    else:
        raise ValueError(f"{json.dumps(value, default=str)[:80]} is no form of tests")
    if name:
        calls = [(_arguments(given), _expected(wanted, given)) for given, wanted in pairs]
        return UnitTests(function=name, calls=tuple(calls))
    texts = [("\n".join(_lines(given)), "\n".join(_lines(wanted))) for given, wanted in pairs]
    return UnitTests(pairs=tuple(texts))


def _lines(value: Any) -> list[str]:
    """Text as it is, and a list of lines; numbers are written out."""
    parts = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(part, bool) or not isinstance(part, str | int | float) for part in parts):
        raise ValueError(f"{json.dumps(value, default=str)[:80]} is no text, and no column {NAMES[0]} names a function")
    return [str(part) for part in parts]


def _arguments(given: Any) -> list[Any]:
    """The arguments of a call: a list, or text with a JSON value on each line."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.split("\n") if line.strip()]
    if not isinstance(given, list | tuple):
        raise ValueError(f"{json.dumps(given, default=str)[:80]} is no list of arguments")
    return list(given)


def _expected(wanted: Any, given: Any) -> Any:
    return json.loads(wanted) if isinstance(wanted, str) and isinstance(given, str) else wanted


def _source(parts: Sequence[str], entry: str, setup: str) -> UnitTests:
    source = "\n".join([setup, *parts]).lstrip("\n")
    tree = ast.parse(source)
    checks = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    called = any(isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check" for node in ast.walk(tree))
    if checks and not (entry or called):
        raise ValueError("they define check(candidate), and no column entry_point names the candidate")
    if not any(map(_can_fail, ast.walk(tree))):
        raise ValueError("nothing in them can fail, such as an assertion")
    return UnitTests(source=source, entry=entry if checks and not called else "")


def _can_fail(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
        return name.lower().startswith("assert") or name == "fail"
    return isinstance(node, ast.Assert | ast.Raise)


def _free_names(source: str) -> frozenset[str]:
    """Names that some code uses and does not define."""
    tree = ast.parse(source)
    used: set[str] = set()
    defined = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.ImportFrom) and node.module in ("solution", "main"):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return frozenset(used - defined)


# The program -----------------------------------------------------------------------------------------------------


def extract_program(text: str, tests: UnitTests) -> str:
    """The program of a response: one of its blocks of code, or all of it without any.

    Blocks are read as Markdown reads them; those that are marked as Python are preferred. Of several the last one
    counts that defines what the tests call or, for a program that reads its input, reads it; else the last one that is
    more than an expression, such as an output.
    """
    blocks = [token for token in MarkdownIt().parse(text) if token.type == "fence" and token.content.strip()]
    if not blocks:
        return text.rstrip().removesuffix("```").removesuffix("~~~")
    words = [(token.info.strip().lower().split() or [""])[0].strip("{}.,:") for token in blocks]
    marked = [token.content for token, word in zip(blocks, words, strict=True) if word in PYTHON]
    candidates = marked or [token.content for token in blocks]
    for fits in (lambda tree: _answers(tree, tests), _is_program):
        for source in reversed(candidates):
            tree = _parsed(source)
            if tree is not None and fits(tree):
                return source
    return candidates[-1]


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _answers(tree: ast.Module, tests: UnitTests) -> bool:
    """Whether a block defines what the tests call, or reads input."""
    if tests.pairs:
        reads = {"input", "stdin", "open"}
        return any(getattr(node, "id", getattr(node, "attr", "")) in reads for node in ast.walk(tree))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
                if isinstance(target, ast.Name)}  # fmt: skip
    return not tests.needs.isdisjoint(defined)


def _is_program(tree: ast.Module) -> bool:
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in tree.body)
