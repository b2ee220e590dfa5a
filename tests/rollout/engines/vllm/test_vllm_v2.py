"""The vLLM engine on Model Runner V2: its policy here, its rollouts in a process of their own (vllm_v2_cases.py)."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
TRITON = Path(sys.prefix) / "triton"
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'specrl[vllm]'"
)


@pytest.mark.long
@needs_vllm
@pytest.mark.skipif(not TRITON.is_dir(), reason="needs Triton's interpreter: make interpreter")
def test_the_cases_on_tritons_interpreter():
    """The interpreter has to be there before vLLM is imported, so the cases cannot run in this process."""
    plugin, cases = "tests.rollout.engines.vllm.vllm_shim", "tests/rollout/engines/vllm/vllm_v2_cases.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", plugin, cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TRITON}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout


def best_length(p, pass_s, token_s, rows, overhead, limit):
    """Brute force: the length that saves most seconds."""

    def saved(k):
        return sum(p**j for j in range(1, k + 1)) * (pass_s / rows + token_s) - token_s * (k + overhead)

    return max(range(limit + 1), key=lambda k: saved(k) if k else 0.0)


@needs_vllm
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("rows", [1, 8, 256])
@pytest.mark.parametrize("overhead", [0, 16, 64])
def test_the_draft_length_saves_most(p, rows, overhead):
    from rollout.engines.vllm.two_requests import draft_length

    for pass_s, token_s in ((1e-2, 1e-5), (1e-2, 1e-4), (1e-3, 1e-3)):
        for limit in (0, 3, 40, 400):
            k = draft_length(p, pass_s, token_s, rows, overhead, limit)
            best = best_length(p, pass_s, token_s, rows, overhead, limit)
            assert k == best or (k, best) in {(best - 1, best), (best + 1, best)}, "ties of the last token"
            assert 0 <= k <= limit


@needs_vllm
def test_a_draft_that_cannot_pay_is_not_verified():
    from rollout.engines.vllm.two_requests import draft_length

    assert draft_length(0.9, pass_s=1e-2, token_s=1e-4, rows=1, overhead=16, limit=50) > 8
    assert draft_length(0.9, pass_s=1e-2, token_s=1e-4, rows=10_000, overhead=16, limit=50) == 0, "compute is the limit"
    assert draft_length(0.3, pass_s=1e-2, token_s=1e-3, rows=64, overhead=16, limit=50) == 0, "too few accepted"
    lengths = [draft_length(p, 1e-2, 1e-4, 4, 16, 500) for p in (0.5, 0.8, 0.95, 0.99)]
    assert lengths == sorted(lengths)
    assert math.isfinite(draft_length(0.9999, 1e-2, 1e-7, 1, 16, 10**6))
