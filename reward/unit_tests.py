"""The unit tests of a row, recognised by their form in the columns of data sets, and the program of a completion.

Nothing here runs what it reads.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

from markdown_it import MarkdownIt

from specrl.reward.judge import MODULES

TESTS = (
    *("tests", "test_list", "test", "test_cases", "unit_tests", "input_output", "verification_info", "private_tests"),
    *("private_test_cases", "official_tests", "public_tests", "public_test_cases", "generated_tests"),
    *("inputs", "reward_model", "ground_truth"),
)
"""Columns with tests in any form; `inputs` goes with `outputs`."""
INSIDE = "test_cases", "ground_truth"
"""Keys of an object under which its tests are."""
SETUP = "test_setup_code", "test_imports"
"""Columns with Python code that runs before the tests."""
FORMS = (
    "assertions, test functions, a unittest class, or check(candidate) with a column entry_point; a list of "
    "assertions; inputs and outputs, or a list of objects or pairs of input and output, of a program or, with fn_name, "
    "of a function; any of them also as JSON text"
)
NAMES = "fn_name", "func_name", "function_name"
PYTHON = "python", "py"
"""Languages of blocks, without what follows the letters: `python3`, `python title=x`."""


@dataclass(frozen=True)
class UnitTests:
    """What a program is asked. Exactly one of `source`, `pairs` and `calls` is not empty."""

    source: str = ""
    """Python code that raises where the program is wrong."""
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
        return _free_names(self.source)


def unit_tests(fields: Mapping[str, Any]) -> UnitTests:
    """The tests of a row.

    Raises:
        ValueError: there are none, they have no known form, or nothing in them can fail.
    """
    entry = str(fields.get("entry_point") or "")
    column = next((column for column in TESTS if _filled(fields.get(column))), None)
    if column is None:
        raise ValueError(
            f"the code reward found no unit tests in the columns {', '.join(fields) or '(none)'}. It needs one of "
            f"{', '.join(TESTS)}"
        )
    value = fields[column]
    if column == "inputs":
        value = {"inputs": value, "outputs": fields.get("outputs") or []}
    setup = "\n".join(line for key in SETUP if fields.get(key) for line in _lines(fields[key]))
    try:
        return _recognised(_decoded(value), _name_in(fields) or entry, entry, setup)
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"the tests in column {column} cannot be run: {error}. Known forms: {FORMS}") from None


def _filled(value: Any) -> bool:
    """Whether there is something in a column; in lists of an object, too."""
    return any(map(_filled, value.values())) if isinstance(value, Mapping) else bool(value)


def _decoded(value: Any) -> Any:
    """Text that holds data as data: JSON, or a list as Python writes it; other text as it is."""
    text = value.strip() if isinstance(value, str) else ""
    if text[:1] not in ("[", "{"):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return value


def _recognised(value: Any, name: str, entry: str, setup: str) -> UnitTests:
    if isinstance(value, str):
        return _source([value], entry, setup)
    if isinstance(value, Sequence):
        value = [_decoded(part) for part in value]
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return _source(value, entry, setup)
    inside = next((key for key in INSIDE if key in value), None) if isinstance(value, Mapping) else None
    if inside:
        return _recognised(_decoded(value[inside]), _name_in(value) or name, entry, setup)
    if isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
        name = next(filter(None, map(_name_in, value)), name)
        kinds = {str(part.get("testtype") or part.get("type") or "") for part in value}
        if all(kind.startswith("stdin") for kind in kinds):
            name = ""
        if not name and any(kind.startswith("function") for kind in kinds):
            raise ValueError(f"they call a function, and nothing names it, such as {NAMES[0]}")
        pairs = [(part["input"], part["output"]) for part in value]
    elif isinstance(value, list) and value and all(isinstance(p, list | tuple) and len(p) == 2 for p in value):
        pairs = [(given, wanted) for given, wanted in value]
    elif isinstance(value, Mapping) and ({"inputs", "outputs"} <= value.keys() or {"input", "output"} <= value.keys()):
        plural = "s" if "inputs" in value else ""
        name = _name_in(value) or name
        inputs = _decoded(value[f"input{plural}"])
        outputs = _decoded(value[f"output{plural}"])
        if not inputs or isinstance(inputs, str) or isinstance(outputs, str) or len(inputs) != len(outputs):
            raise ValueError("inputs and outputs must be lists of equal length")
        pairs = list(zip(inputs, outputs, strict=True))
    else:
        raise ValueError(f"{json.dumps(value, default=str)[:80]} is no form of tests")
    if name:
        calls = [(_arguments(given), _expected(wanted, given)) for given, wanted in pairs]
        return UnitTests(function=name.rpartition(".")[2], calls=tuple(calls))
    texts = [("\n".join(_lines(given)), "\n".join(_lines(wanted))) for given, wanted in pairs]
    return UnitTests(pairs=tuple(texts))


def _name_in(value: Mapping[str, Any]) -> str:
    """The function that a row or its tests name, also in an object `metadata`."""
    inner = _decoded(value.get("metadata") or {})
    places = [value, inner] if isinstance(inner, Mapping) else [value]
    return next((str(place[key]) for place in places for key in NAMES if place.get(key)), "")


def _lines(value: Any) -> list[str]:
    """Text as it is, and a list of lines; numbers are written out."""
    parts = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(part, bool) or not isinstance(part, str | int | float) for part in parts):
        raise ValueError(f"{json.dumps(value, default=str)[:80]} is no text, and no column {NAMES[0]} names a function")
    return [str(part) for part in parts]


def _arguments(given: Any) -> list[Any]:
    """The arguments of a call: a list, or text with a JSON value on each line, or `name = value, ...`."""
    if not isinstance(given, str):
        if not isinstance(given, list | tuple):
            raise ValueError(f"{json.dumps(given, default=str)[:80]} is no list of arguments")
        return list(given)
    try:
        return [json.loads(line) for line in given.split("\n") if line.strip()]
    except ValueError:
        call: Any = ast.parse(f"f({given})", mode="eval").body
    return [ast.literal_eval(part) for part in (*call.args, *(keyword.value for keyword in call.keywords))]


def _expected(wanted: Any, given: Any) -> Any:
    """What a call has to return: a value, or where the arguments are text, text that stands for one."""
    if not isinstance(wanted, str) or not isinstance(given, str):
        return wanted
    try:
        return json.loads(wanted)
    except ValueError:
        return ast.literal_eval(wanted)


def _source(parts: Sequence[str], entry: str, setup: str) -> UnitTests:
    source = "\n".join([setup, *parts]).lstrip("\n")
    tree = ast.parse(source)
    checks = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    called = any(isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check" for node in ast.walk(tree))
    if checks and not (entry or called):
        raise ValueError("they define check(candidate), and no column entry_point names the candidate")
    for node in (inner for outer in tree.body for inner in (outer, *getattr(outer, "body", ()))):
        if isinstance(node, ast.FunctionDef) and (node.name.startswith(("setup", "teardown")) or _has_fixtures(node)):
            raise ValueError(f"{node.name} needs pytest, which does not run here")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise ValueError("they import the program from a package, and it is the module solution")
        if _in_process(node):
            raise ValueError(f"{ast.unparse(node)} acts on the process that runs it, and the program runs in another")
    if not any(map(_can_fail, ast.walk(tree))):
        raise ValueError("nothing in them can fail, such as an assertion")
    return UnitTests(source=f"{source}\ncheck({entry})" if checks and not called else source)


def _has_fixtures(node: ast.FunctionDef) -> bool:
    """Whether a test function has parameters that only pytest gives, or that decorators of pytest fill in."""
    parameters = [argument.arg for argument in node.args.args if argument.arg != "self"]
    return node.name.startswith("test") and len(parameters) > len(node.args.defaults)


def _in_process(node: ast.AST) -> bool:
    """Whether it replaces what a program prints to, reads from or calls."""
    name = getattr(node, "id", getattr(node, "attr", ""))
    is_stream = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and name in ("stdin", "stdout")
    return is_stream or name in ("redirect_stdout", "redirect_stderr", "patch")


def _can_fail(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
        return name.lower().startswith("assert") or name == "fail"
    return isinstance(node, ast.Assert | ast.Raise)


def _free_names(source: str) -> frozenset[str]:
    """Names that some code uses and does not define."""
    tree = ast.parse(source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    of_program = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in MODULES
        for alias in node.names
    }
    return frozenset((used - _bound(tree) - set(dir(builtins))) | of_program)


# The program -----------------------------------------------------------------------------------------------------


MARKDOWN = MarkdownIt("commonmark", {"html": False}).disable("code")
"""A block of HTML would hide what follows it, and a fence that is indented by any width is one."""
OPEN = re.compile(r"(?:^|\n)[ \t]*(?:`{3,}|~{3,})[^`\n]*\n?\Z")
AFTER_TEXT = re.compile(r"(?:(?<=[^\W\d]|[:;,!?])|(?<=\w>))[ \t]?(?=```(?:python|py)\d?[ \t]*$)", re.MULTILINE | re.I)
"""Where a fence shares a line with text before it, as in "The program: ```python"."""


def extract_program(text: str, tests: UnitTests, prompt: str = "") -> str:
    """The program of a response: one of its blocks of code, or all of it without any.

    Blocks are read as Markdown reads them; those that are marked as Python are preferred. Of several the last one
    counts that defines what the tests call or, for a program that reads its input, reads it; else the last one that is
    more than an expression, such as an output. What precedes the first fence is the program if it is code, or if the
    prompt ends with the opening fence.
    """
    text = text.replace("\r\n", "\n")
    head = text.partition("\n```")[0]
    tree = None if "```" in head else _parsed(head)
    begun = OPEN.search(prompt) and not text.lstrip().startswith("```")
    if begun or (tree is not None and _is_program(tree)):
        return head
    blocks = [
        (re.split(r"[^a-z]", token.info.strip().lower())[0], _closed(dedent(token.content)))
        for token in MARKDOWN.parse(AFTER_TEXT.sub("\n", text))
        if token.type == "fence" and token.content.strip()
    ]
    if not blocks:
        return text.rstrip().removesuffix("```").removesuffix("~~~")
    sources = [source for _, source in blocks]
    marked = [source for word, source in blocks if word in PYTHON]
    plain = [source for word, source in blocks if word in ("", *PYTHON)]
    for candidates, fits in ((plain, lambda tree: _answers(tree, tests)), (marked or sources, _is_program)):
        for source in reversed(candidates):
            tree = _parsed(source)
            if tree is not None and fits(tree):
                return source
    return (marked or sources)[-1]


def _closed(source: str) -> str:
    """The code of a block, up to a fence that has text behind it, which Markdown does not take for its end."""
    return source if _parsed(source) is not None else source.partition("\n```")[0] + "\n"


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _answers(tree: ast.Module, tests: UnitTests) -> bool:
    """Whether a block defines what the tests call, or reads input."""
    if tests.pairs:
        reads = {"input", "stdin", "open"}
        used = [node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Load)]
        return any(getattr(node, "id", getattr(node, "attr", "")) in reads for node in used)
    usage = any(isinstance(node, ast.ImportFrom) and node.module in MODULES for node in ast.walk(tree))
    return not usage and not tests.needs.isdisjoint(_bound(tree))


def _bound(tree: ast.AST) -> set[str]:
    """Names that some code binds: functions, classes, variables, imports."""
    nodes = [node for node in ast.walk(tree) if not isinstance(node, ast.keyword)]
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    named = [getattr(node, "asname", None) or getattr(node, "name", "") or getattr(node, "arg", "") for node in nodes]
    return bound | {str(name).partition(".")[0] for name in named if name}


def _is_program(tree: ast.Module) -> bool:
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in tree.body)
