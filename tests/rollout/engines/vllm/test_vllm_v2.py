"""The vLLM engine on Model Runner V2, in processes that enable Triton's interpreter at their start.

Runs test_vllm.py and test_vllm_served.py again, without tests marked `on_v1`. device_cases.py tests
drafts on the device, planned_cases.py those that vLLM's scheduler carries, head_cases.py those of a draft head, and
served_cases.py what only servers on V2 have.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
TRITON = Path(sys.prefix) / "triton"
HERE = "tests.rollout.engines.vllm"
SITE = f"import os\nif os.environ.get('TRITON_INTERPRET'):\n    import {HERE}.vllm_shim\n"
"""For the processes that vLLM starts: they too need a Triton that can run."""

TOGETHER = [
    ["test_vllm.py", "planned_cases.py"],
    ["device_cases.py", "head_cases.py", "served_cases.py", "test_vllm_served.py"],
]
"""Each in one process, which takes a quarter of a minute to start."""


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'specrl[vllm]'")
@pytest.mark.skipif(not TRITON.is_dir(), reason="needs Triton's interpreter: make interpreter")
@pytest.mark.parametrize("files", TOGETHER, ids=lambda files: files[0])
def test_the_cases_on_tritons_interpreter(files, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join(map(str, (tmp_path, TRITON, ROOT)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    environment.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # set by an engine of this process
    command = [sys.executable, "-m", "pytest", "-q", "-p", f"{HERE}.vllm_shim"]
    command += [f"{HERE.replace('.', '/')}/{name}" for name in files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
