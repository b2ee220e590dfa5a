"""How large the house is and how tidy: `python -m benchmarks.house [out=FILE]`, read from the source.

Lines of the four packages, of what a run of config=grpo_math imports (two steps of it are run), and of each extension;
functions, files and constructors that are too large; circles of imports, those inside functions counted too.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles
from textwrap import fill

from specrl.config import load as cli
from specrl.results import tables
from specrl.rollout.sections import doc

ROOT = Path(__file__).parents[1]
PACKAGES = ("rollout", "reward", "trainers", "specrl")
EXTENSIONS = {
    "vllm": r"rollout/engines/vllm/",
    "gpu": r"rollout/engines/local/(static|varlen|graphs|fused|draw_kernel)",
    "workers": r"rollout/workers/|specrl/run/cluster",
    "lossy": r"/lossy/|specrl/(train_judge|train_router)|reward/prm",
    "co-training": r"trainers/cotraining/",
    "session": r"specrl/session",
    "bench": r"specrl/bench",
}
"""What a plain run does without, by the paths of its files."""
FILE, FUNCTION = 300, 50  # lines from which on a file and a function are named
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
    """One file of the packages, by its path below the root."""

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
        """Lines that are not blank, a comment or part of a string that stands alone, such as a docstring."""
        alone = (n for n in ast.walk(self.tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
        told = {line for node in alone for line in range(node.lineno, node.end_lineno + 1)}
        kept = (line.strip() for at, line in enumerate(self.text.splitlines(), 1) if at not in told)
        return sum(bool(line) and not line.startswith("#") for line in kept)

    @property
    def module(self) -> str:
        name = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return name if name.startswith("specrl") else f"specrl.{name}"

    def functions(self) -> Iterator[tuple[str, int]]:
        """Name and lines of every function."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{self.path}:{node.name}", node.end_lineno - node.lineno + 1

    def constructors(self) -> Iterator[tuple[str, int]]:
        """Name of every class with a constructor, and how many arguments it takes."""
        for node in ast.walk(self.tree):
            for each in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    given = each.args.posonlyargs + each.args.args + each.args.kwonlyargs
                    yield f"{self.path}:{node.name}", len(given) - 1

    def imports(self, types: bool) -> set[str]:
        """What may be modules among the names it imports anywhere. Args: types: also for type checkers alone."""
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


def sources(root: Path) -> list[Source]:
    """Every file of the packages."""
    files = sorted(file for package in PACKAGES for file in (root / package).rglob("*.py"))
    return [Source(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def circles(files: Iterable[Source], types: bool = False) -> list[list[str]]:
    """Sets of modules each of which leads to all others of its set by imports."""
    files = list(files)
    known = {file.module for file in files}
    leads = {file.module: (file.imports(types) & known) - {file.module} for file in files}
    reach: dict[str, set[str]] = {}
    for start in leads:
        seen, unseen = set(), [start]
        while unseen:
            new = leads[unseen.pop()] - seen
            seen |= new
            unseen += new
        reach[start] = seen
    together = {frozenset(b for b in reach[a] if a in reach[b]) for a in reach if a in reach[a]}
    return sorted(sorted(each) for each in together)


def imported() -> set[str]:
    """Paths of the files that two steps of config=grpo_math import."""
    with tempfile.TemporaryDirectory() as folder:
        listing = Path(folder) / "files"
        words = ["config=grpo_math", f"output_dir={folder}", "name=house", *SHORT]
        command = [sys.executable, "-c", RUN, str(listing), *words]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=600)
        files = [Path(line).resolve() for line in listing.read_text().splitlines()]
    return {file.relative_to(ROOT).as_posix() for file in files if file.is_relative_to(ROOT)}


def groups(files: list[Source], path: set[str]) -> dict[str, list[Source]]:
    """The files by package, those that a run imports, and those of each extension."""
    found = {package: [file for file in files if file.path.startswith(f"{package}/")] for package in PACKAGES}
    found |= {"all": files, "config=grpo_math": [file for file in files if file.path in path]}
    return found | {
        name: [file for file in files if re.search(pattern, file.path)] for name, pattern in EXTENSIONS.items()
    }


def figures(files: list[Source], path: set[str]) -> dict:
    """The content of the JSON file."""
    functions = [each for file in files for each in file.functions()]
    sizes = [lines for _, lines in functions]
    return {
        "lines": {
            name: {"files": len(part), "lines": sum(f.lines for f in part), "code": sum(f.code for f in part)}
            for name, part in groups(files, path).items()
        },
        "functions": {"count": len(sizes), "median": median(sizes), "p90": quantiles(sizes, n=10)[-1]},
        f"files over {FILE} lines": {file.path: file.lines for file in files if file.lines > FILE},
        f"functions over {FUNCTION} lines": {name: lines for name, lines in functions if lines > FUNCTION},
        "widest constructor": max((each for file in files for each in file.constructors()), key=lambda each: each[1]),
        "circles": circles(files),
        "circles, types counted": circles(files, types=True),
    }


def show(found: dict) -> None:
    from rich.console import Console

    console = Console(width=80)
    rows = [(name, *(f"{each[key]}" for key in ("files", "lines", "code"))) for name, each in found["lines"].items()]
    tables.show(console, "", ("part", "files", "lines", "code lines"), rows)
    functions, (widest, count) = found["functions"], found["widest constructor"]
    print(f"{functions['count']} functions: median {functions['median']:.0f} lines, p90 {functions['p90']:.0f}")
    print(f"widest constructor: {count} arguments\n  {widest}")
    for what in (f"files over {FILE} lines", f"functions over {FUNCTION} lines"):
        print(f"{what}: {len(found[what])}", *(f"  {size:4}  {name}" for name, size in found[what].items()), sep="\n")
    for what in ("circles", "circles, types counted"):
        print(f"{what}: {len(found[what])}")
        for each in found[what]:
            print(fill(" ".join(each), 80, initial_indent="  ", subsequent_indent="    "))


def main(options: HouseConfig) -> int:
    found = figures(sources(ROOT), imported())
    show(found)
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=HouseConfig))
