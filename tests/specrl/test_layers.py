"""Imports flow one way: specrl -> trainers -> {rollout, reward}; heavy packages are imported in one place each."""

import ast
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from benchmarks.house import circles, imported, sources

ROOT = Path(__file__).parents[2]
BELOW = {
    "rollout": {"rollout"},
    "reward": {"reward"},
    "trainers": {"trainers", "rollout", "reward"},
    "specrl": {"specrl", "trainers", "rollout", "reward"},
}
DOORS = {
    "trl": ("trainers/grpo/*.py", "trainers/ppo/*.py"),
    "vllm": ("rollout/engines/vllm/*.py",),
    "ray": ("rollout/workers/pool.py", "rollout/workers/calls.py", "specrl/run/cluster.py"),
}
LOSSY = ("rollout/lossy*", "specrl/lossy*")
"""Code that changes the distribution of the tokens. Exact code imports none of it."""
GATES = (
    *("rollout/build.py", "specrl/run/run.py", "specrl/evaluate.py"),
    *("specrl/train_router.py", "specrl/train_judge.py"),
)
"""Where the acceptance rule is chosen, and the commands that make what lossy rules need."""
EXTENSIONS = (
    *("rollout/engines/vllm/*", "rollout/workers/*", "rollout/lossy/*", "specrl/lossy/*", "specrl/bench.py"),
    *("trainers/cotraining/*", "trainers/ppo/*", "specrl/session.py"),
)
"""What a plain run does without."""
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_BUILTINS = {"eval", "exec", "compile", "__import__"}
UNSAFE_NAMES = {"torch.load", "torch.serialization", "torch.package", "torch.hub"}
UNSAFE_CALLS = {*UNSAFE_NAMES, "builtins.eval", "builtins.exec", "os.system"}
UNSAFE_FLAGS = {"allow_pickle": False, "weights_only": True}
"""Keywords, and the only value that a call may give them."""


def faults(path, code):
    """The rules that `code` at `path` breaks, as readable lines."""
    package = path.split("/")[0]
    tree = ast.parse(code)
    found = []
    for line, module in imports(tree, path):
        top = module.split(".")[0]
        if top == "specrl":
            top = package_of(module)
        if top in BELOW and top not in BELOW[package]:
            found.append(f"{path}:{line}: {package} must not import {module}")
        if top in DOORS and not any(fnmatch(path, door) for door in DOORS[top]):
            found.append(f"{path}:{line}: only {' and '.join(DOORS[top])} may import {top}")
        if lossy(path_of(module)) and not lossy(path) and path not in GATES:
            found.append(f"{path}:{line}: exact code must not import {module}")
        if top in UNSAFE_MODULES or any(f"{module}.".startswith(f"{name}.") for name in UNSAFE_NAMES):
            found.append(f"{path}:{line}: {module} can run code from data")
    return found + [f"{path}:{line}: {name} can run code from data" for line, name in unsafe_calls(tree)]


def package_of(module):
    """The folder of a module of ours: `specrl.rollout.types` is in rollout, `specrl.config` in specrl."""
    second = module.split(".")[1:2]
    return second[0] if second and second[0] in BELOW else "specrl"


def path_of(module):
    """The file of a module of ours, such as rollout/types.py of `specrl.rollout.types`."""
    if package_of(module) != "specrl":
        module = module.removeprefix("specrl.")
    return f"{module.replace('.', '/')}.py"


def lossy(path):
    return any(fnmatch(path, part) for part in LOSSY)


def imports(tree, path):
    """(line, dotted module) of every import, also inside functions and through importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = path.split("/")[: -node.level] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield node.lineno, module
            inside = (f"{module}.{alias.name}" for alias in node.names if module == "torch")
            yield from ((node.lineno, name) for name in inside)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def unsafe_calls(tree):
    """(line, name) of what can run code from data: calls, names of torch that do so under any alias, and flags."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in UNSAFE_NAMES:
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            unsafe = name in UNSAFE_CALLS - UNSAFE_NAMES
            if unsafe or (isinstance(node.func, ast.Name) and name in UNSAFE_BUILTINS):
                yield node.lineno, name
            for keyword in node.keywords:
                only = UNSAFE_FLAGS.get(keyword.arg)
                if only is not None and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is only):
                    yield node.lineno, keyword.arg


def test_no_imports_go_in_circles():
    """Imports inside functions count; `test_house.py` has the planted circle."""
    assert circles(sources(ROOT)) == []


@pytest.mark.long
def test_a_plain_run_imports_no_extension():
    path = imported()
    assert "trainers/grpo/trainer.py" in path
    assert [file for file in path if any(fnmatch(file, part) for part in EXTENSIONS)] == []


@pytest.mark.parametrize("package", BELOW)
def test_the_code_keeps_the_rules(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    assert [fault for file in files for fault in faults(file.relative_to(ROOT).as_posix(), file.read_text())] == []


def eager(code):
    """The modules with a door that `code` imports while it is itself imported."""
    top = ast.Module([node for node in ast.parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    found = {module for _, module in imports(top, "x.py")}
    vllm = {
        m for m in found if m.startswith("specrl.rollout.engines.vllm.") and m != "specrl.rollout.engines.vllm.wire"
    }
    return sorted(vllm | {m for m in found if m.split(".")[0] in DOORS})


def test_the_session_of_other_trainers_imports_neither_vllm_nor_ray():
    assert eager((ROOT / "specrl" / "session.py").read_text()) == []
    assert eager("import vllm.x\ndef f():\n    import ray\nfrom specrl.rollout.engines.vllm.served import x") == [
        "specrl.rollout.engines.vllm.served",
        "vllm.x",
    ]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("rollout/cache/memory.py", "import specrl.reward.base"),
        ("rollout/cache/memory.py", "from specrl.trainers.losses import clip"),
        ("rollout/engines/base.py", "def f():\n    from specrl.config import Config"),
        ("reward/math.py", "from specrl.rollout.types import Row"),
        ("specrl/train.py", "import trl.trainer as t"),
        ("specrl/train.py", "importlib.import_module('vllm.config')"),
        ("specrl/session.py", "import ray"),
        ("rollout/cache/memory.py", "import pickle"),
        ("rollout/cache/memory.py", "from cloudpickle import loads"),
        ("rollout/cache/memory.py", "x = torch.load(path)"),
        ("rollout/cache/memory.py", "from torch import load"),
        ("rollout/cache/memory.py", "read = torch.load"),
        ("trainers/ppo/snapshot.py", "x = torch.serialization.load(path)"),
        ("trainers/ppo/snapshot.py", "x = read(path, weights_only=False)"),
        ("rollout/cache/memory.py", "x = numpy.load(path, allow_pickle=True)"),
        ("rollout/speculative.py", "from specrl.rollout.lossy.judge import Judge"),
        ("specrl/train.py", "import specrl.lossy.judging"),
        ("reward/math.py", "eval(text)"),
        ("reward/math.py", "__import__(name)"),
    ],
)
def test_planted_faults_are_found(path, code):
    assert len(faults(path, code)) == 1


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (
            "specrl/train.py",
            "from specrl.trainers.grpo.trainer import train\nfrom specrl.rollout.cache import TrajectoryCache",
        ),
        ("trainers/grpo/trainer.py", "import trl\nfrom specrl.rollout.config import doc\nfrom .losses import clip"),
        ("rollout/engines/base.py", "from ..types import Request\nfrom . import transformers"),
        ("trainers/losses.py", "model.eval()\nre.compile('x')\ntorch.compile(m)\nnumpy.load(p, allow_pickle=False)"),
        ("rollout/build.py", "from specrl.rollout.lossy.judge import build_judge"),
    ],
)
def test_legal_code_passes(path, code):
    assert faults(path, code) == []


def imported_in(folder, code):
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["rollout", "reward", "trainers"])
def test_a_package_has_one_name(name):
    done = imported_in(ROOT, f"import {name}")
    assert done.stderr.splitlines()[-1] == f"ImportError: {name} is the package specrl.{name}: import that"


def test_a_clone_without_links_says_so(tmp_path):
    shutil.copytree(ROOT / "specrl", tmp_path / "specrl", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "specrl" / "rollout").unlink()
    (tmp_path / "specrl" / "rollout").write_text("../rollout")
    done = imported_in(tmp_path, "import specrl")
    assert "git clone -c core.symlinks=true" in done.stderr.splitlines()[-1]
