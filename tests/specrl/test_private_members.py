"""Tests use what a user could: no underscored name of the packages, as far as the source shows it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOREIGN = {
    *("_generate_and_score_completions", "_get_per_token_logps_and_entropies", "_compute_loss"),  # of TRL's trainers
    *("_generate", "_generate_single_turn"),  # the same
    *("_attn_implementation", "_clip_grad_norm"),  # transformers
    *("_preempt_request", "_run_model", "_verify", "_sample_random", "_get_logprobs_tensors"),  # vLLM
    *("_private", "_global_node"),  # Ray
    *("_patch_lang", "_get_np_dtype"),  # Triton's interpreter
    *("_asdict", "_replace"),  # of every named tuple
    "_exit",  # os
}
"""Names of other libraries that there is no public way to."""
PATCHES = ("setattr", "delattr", "getattr", "patch", "object")


def private(name):
    return name.startswith("_") and not name.startswith("__") and name not in FOREIGN


def faults(code):
    """(line, name) of every private member that `code` reads, sets, patches or imports; its own classes may theirs."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and private(node.attr) and ast.unparse(node.value) not in ("self", "cls"):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names if private(alias.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in PATCHES:
            constants = (each.value for each in node.args[:2] if isinstance(each, ast.Constant))
            last = [each.rpartition(".")[2] for each in constants if isinstance(each, str)]
            yield from ((node.lineno, name) for name in last if private(name))


def test_tests_use_public_members():
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 100
    found = [(file.relative_to(ROOT).as_posix(), *fault) for file in files for fault in faults(file.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "pool._workers[0].pid = 1",
        "from specrl.rollout.engines.vllm.engine import _unchanged_process",
        "mock.patch.object(pool, '_session')",
    ],
)
def test_planted_faults_are_found(code):
    assert len(list(faults(code))) == 1


def test_its_own_and_foreign_members_are_legal():
    assert list(faults("class Fake:\n    def f(self):\n        return self._engine._compute_loss()")) == []
