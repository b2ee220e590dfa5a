"""The fenced blocks of the pages: which commands run in tests/integration/test_examples.py, which do not, and why.

That the options of all of them are legal is tested by tests/specrl/test_promises.py.
"""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/gpu/README.md")),
    *sorted((ROOT / "benchmarks" / "research").glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]

NOT_RUN = {
    "git clone ": "needs the network",
    "make ": "sets up an environment from the network",
    "pip ": "needs the network",
    "python -m pip ": "needs the network",
    "grep ": "writes the list of packages for the next line, which needs the network",
    "PYTHONPATH=SITE ": "needs what the lines before it install; tests/benchmarks/test_gpu.py runs the script",
    "ray ": "needs several machines; tests/integration/test_ray.py runs workers",
    "RAY_AUTH_MODE=": "needs several machines; tests/integration/test_ray.py runs workers",
    "torchrun ": "needs several GPUs; tests/integration/test_two_processes.py runs two processes",
    "accelerate launch ": "needs several GPUs; tests/integration/test_sharded.py runs two processes",
    "python -m specrl.serve ": "serves until it is stopped; tests/trainers/grpo/test_trl_vllm.py starts such a server",
    "python -m specrl.report run=outputs/ray_grpo_math ": "needs the run of the line before it, which is not trained",
}
"""Beginnings of commands that no test can run, with the reason."""
DRY_RUN = {
    "config=grpo_math_vllm": "starting vLLM takes long; tests/integration/test_vllm.py trains with it",
    "config=ray_grpo_math": "starting Ray takes long; tests/integration/test_ray.py trains with it",
    "config=grpo_gsm8k": "needs a GPU and a download",
    "model=Qwen/": "needs a download",
}
"""Words of commands that run with dry_run=true, with the reason."""
PYTHON = {
    "docs/extending.md": "run in order, as one script",
    "docs/adapters.md": "run with made-up answers of a server",
    "docs/trl.md": "compiled, as they need a trainer; tests/trainers/grpo/test_reusing.py trains with such scripts",
    "README.md": "compiled, likewise",
}
"""What a test does with the Python code and the patches of a page."""
SHELL = ("cmp ", "python -c ")
"""Beginnings of commands that run as they are."""
SHELL_LANGUAGES = ("", "sh", "bash")
"""Languages of blocks of commands."""
PRINTED = ("Step ", "Eval at step ", "Speedup of ", "reward: ", "draft ", "sampled ", "emitted ")
"""Beginnings of lines that a block without a language shows and nobody types."""


@dataclass(frozen=True)
class Block:
    page: Path
    first_line: int
    """Number of the line before the text, which has the fence."""
    language: str
    text: str


FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)


def blocks(page: Path, text: str) -> list[Block]:
    """The fenced blocks of a page, without the indentation of the list item that they may belong to."""
    fences = FENCE.finditer(text)
    return [Block(page, text.count("\n", 0, fence.start(3)), fence[2], dedent(fence[3])) for fence in fences]


def indented(text: str) -> list[str]:
    """First lines of code blocks by indentation, which have no language."""
    return re.findall(r"^\n {4,}(\S.*)", FENCE.sub("", text), re.MULTILINE)


def commands(block: Block) -> list[str]:
    """The commands of a block without their comments; a line that ends with a backslash continues."""
    lines = block.text.replace("\\\n", " ").splitlines()
    stripped = (re.sub(r"(^|\s+)# .*", "", line).strip() for line in lines)
    return [" ".join(line.split()) for line in stripped if line]


def treatment(block: Block, command: str) -> str:
    """What happens to a line of a block: run, dry run, shell, not run or printed; empty if nobody has decided."""
    if any(command.startswith(start) for start in NOT_RUN):
        return "not run"
    if command.startswith(SHELL):
        return "shell"
    if command.startswith("python -m specrl."):
        return "dry run" if any(word in command for word in DRY_RUN) else "run"
    return "printed" if not block.language and command.startswith(PRINTED) else ""


def unclassified(found: list[Block]) -> list[str]:
    """Blocks and lines that no rule of this file covers. A block of the language `text` holds nothing to type."""
    wrong = []
    for block in found:
        if block.language in ("python", "diff"):
            known = block.page.relative_to(ROOT).as_posix() in PYTHON
        else:
            known = block.language in ("text", *SHELL_LANGUAGES)
        if not known:
            wrong.append(f"line {block.first_line}: {block.language}")
        if block.language in SHELL_LANGUAGES:
            wrong += [line for line in commands(block) if not treatment(block, line)]
        elif block.language == "text":
            wrong += [line for line in commands(block) if line.startswith("python ") or treatment(block, line)]
    return wrong


def source(block: Block) -> str:
    """The Python code of a block; of a patch, the script after it."""
    if block.language == "python":
        return block.text
    return "\n".join(line[1:] for line in block.text.splitlines() if not line.startswith("-"))


def missing_names(code: str) -> list[str]:
    """Names that the code imports from specrl and that do not exist.

    Raises:
        SyntaxError: the code is not Python.
    """
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    names = [(node.module or "", alias.name) for node in imports for alias in node.names]
    ours = [(module, name) for module, name in names if module.partition(".")[0] == "specrl"]
    return [f"{module}.{name}" for module, name in ours if not hasattr(importlib.import_module(module), name)]
