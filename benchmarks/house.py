"""Size and order of this repository, read from its files: `python -m benchmarks.house [out=FILE]`.

Counts lines of code (neither blank, comment nor docstring) of the product and of what a run of config=grpo_math imports
(two steps of it are run), and lines and words of the rest; circles of imports, also those inside functions and those
for type checkers alone; what is too large; and words that this project once used in a sense of its own.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from specrl.config import load as cli
from specrl.results import tables
from specrl.rollout.sections import doc

ROOT = Path(__file__).parents[1]
PACKAGES = ("rollout", "reward", "trainers", "specrl")
PAGES = ("README.md", "benchmarks/README.md", "docs/*.md")
LONGEST_FILE = 300
LONGEST_FUNCTION = 50
PRIVATE_WORDS = {
    *("law", "laws", "stand", "stands", "stood", "tell", "tells", "told", "behind", "room", "place", "places", "fed"),
    *("found", "given", "own", "whole", "apart", "meanwhile", "ride", "rides", "beside"),
}
"""Most have an ordinary sense too, so the count is not expected to reach zero."""
RUN = """
import sys
from specrl import train
from specrl.config import load as cli
code = cli.run(train.main, sys.argv[2:])
files = {m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
open(sys.argv[1], "w").write("\\n".join(sorted(files)))
raise SystemExit(code)
"""
SHORT = ("trainer.max_steps=2", "rollout.measure_every=1", "rollout.max_new_tokens=32", "trainer.eval_prompts=4")


@dataclass
class HouseConfig:
    out: str = doc("", "write the figures to this JSON file")


@dataclass(frozen=True)
class Source:
    """One Python file, by its path below the root."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def code(self) -> int:
        """Lines that are not blank, a comment or part of a string statement, such as a docstring."""
        strings = (n for n in ast.walk(self.tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
        documented = {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        lines = (line.strip() for number, line in enumerate(self.text.splitlines(), 1) if number not in documented)
        return sum(bool(line) and not line.startswith("#") for line in lines)

    @property
    def module(self) -> str:
        name = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return name if name.startswith("specrl") else f"specrl.{name}"

    @cached_property
    def words(self) -> Counter[str]:
        """How often each word occurs, parts of names included."""
        return words(self.text)

    def functions(self) -> Iterator[tuple[str, int]]:
        """Name and number of lines of every function."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{self.path}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1

    def imports(self, types: bool) -> set[str]:
        """Names that it imports anywhere and that may be modules. Args: types: also those for type checkers alone."""
        names: set[str] = set()
        unseen: list[ast.AST] = [self.tree]
        while unseen:
            node = unseen.pop()
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
            if types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
                unseen += ast.iter_child_nodes(node)
        return names


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower()))


def sources(root: Path, *packages: str) -> list[Source]:
    """Every Python file of these packages, or of the product."""
    files = sorted(file for package in packages or PACKAGES for file in (root / package).rglob("*.py"))
    return [Source(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def circles(files: Iterable[Source], types: bool = False) -> list[list[str]]:
    """Sets of modules each of which leads to all others of its set by imports."""
    files = list(files)
    known = {file.module for file in files}
    leads = {file.module: (file.imports(types) & known) - {file.module} for file in files}
    reach: dict[str, set[str]] = {}
    for start in leads:
        seen: set[str] = set()
        unseen = [start]
        while unseen:
            new = leads[unseen.pop()] - seen
            seen |= new
            unseen += new
        reach[start] = seen
    together = {frozenset(b for b in reach[a] if a in reach[b]) for a in reach if a in reach[a]}
    return sorted(sorted(modules) for modules in together)


def named_once(files: Iterable[Source]) -> list[str]:
    """Classes whose name occurs in exactly one file other than their own."""
    files = list(files)
    names = {file.path: set(re.findall(r"\w+", file.text)) for file in files}
    found = []
    for file in files:
        for node in file.tree.body:
            others = [path for path in names if path != file.path and getattr(node, "name", "") in names[path]]
            if isinstance(node, ast.ClassDef) and len(others) == 1:
                found.append(f"{file.path}:{node.name}")
    return found


def imported() -> set[str]:
    """Paths of the files that two steps of config=grpo_math import."""
    with tempfile.TemporaryDirectory() as folder:
        listing = Path(folder) / "files"
        options = ["config=grpo_math", f"output_dir={folder}", "name=house", *SHORT]
        command = [sys.executable, "-c", RUN, str(listing), *options]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=600)
        files = [Path(line).resolve() for line in listing.read_text().splitlines()]
    return {file.relative_to(ROOT).as_posix() for file in files if file.is_relative_to(ROOT)}


def figures(root: Path, path: set[str]) -> dict:
    """The content of the JSON file. Args: path: files that a plain run imports."""
    product = sources(root)
    benchmarks = [file for file in sources(root, "benchmarks") if "/research/" not in file.path]
    tests = sources(root, "tests")
    pages = [page.read_text(encoding="utf-8") for pattern in PAGES for page in sorted(root.glob(pattern))]
    plain = [file for file in product if file.path in path]
    texts = {
        "product": sum((file.words for file in product), Counter()),
        "benchmarks": sum((file.words for file in benchmarks), Counter()),
        "tests": sum((file.words for file in tests), Counter()),
        "pages": sum((words(page) for page in pages), Counter()),
    }
    functions = [function for file in product for function in file.functions()]
    return {
        "product": size(product),
        "path of config=grpo_math": size(plain),
        "classes that only one other file names": len(named_once(product)),
        "benchmarks outside research": size(benchmarks),
        "tests": size(tests),
        "words of pages": sum(len(page.split()) for page in pages),
        "circles": circles(product),
        "circles, types counted": circles(product, types=True),
        "private words": {
            part: {word: count[word] for word in sorted(PRIVATE_WORDS, key=lambda word: -count[word]) if count[word]}
            for part, count in texts.items()
        },
        f"files over {LONGEST_FILE} lines": {f.path: f.lines for f in product if f.lines > LONGEST_FILE},
        f"functions over {LONGEST_FUNCTION} lines": {n: lines for n, lines in functions if lines > LONGEST_FUNCTION},
    }


def size(files: list[Source]) -> dict[str, int]:
    return {
        "files": len(files),
        "code": sum(file.code for file in files),
        "lines": sum(file.lines for file in files),
    }


def show(found: dict) -> None:
    from rich.console import Console

    console = Console(width=80)
    rows = [
        (name, *(f"{value[key]:,}" for key in ("files", "code", "lines")))
        for name, value in found.items()
        if isinstance(value, dict) and "files" in value
    ]
    tables.show(console, "", ("part", "files", "lines of code", "lines"), rows)
    for name in ("classes that only one other file names", "words of pages"):
        print(f"{name}: {found[name]:,}")
    for part, count in found["private words"].items():
        most = ", ".join(f"{word} {n}" for word, n in list(count.items())[:5])
        print(f"private words, {part}: {sum(count.values()):,} ({most})")
    for name in ("circles", "circles, types counted"):
        print(f"{name}: {len(found[name])}", *(f"  {' '.join(modules)}" for modules in found[name]), sep="\n")
    for name in (f"files over {LONGEST_FILE} lines", f"functions over {LONGEST_FUNCTION} lines"):
        print(f"{name}: {len(found[name])}", *(f"  {lines:4}  {path}" for path, lines in found[name].items()), sep="\n")


def main(options: HouseConfig) -> int:
    found = figures(ROOT, imported())
    show(found)
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=HouseConfig))
