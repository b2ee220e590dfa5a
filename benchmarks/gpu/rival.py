"""Phase 4: vLLM with its own defaults, in a process of its own, on the policy's weights and prompts."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu import model as models
from benchmarks.gpu.run import Absent, Step, installed
from benchmarks.gpu.timing import Context

ROOT = Path(__file__).parents[2]


def steps(context: Context) -> Iterator[Step]:
    yield Step("vllm", partial(by_vllm, context))


def by_vllm(context: Context) -> dict:
    """What benchmarks/gpu/vllm_line.py finds for the rows that model.generate was timed with."""
    if not installed("vllm"):
        raise Absent("vllm is not installed")
    context.needs_cuda("vLLM's defaults")
    with tempfile.TemporaryDirectory() as folder:
        model = models.build(context.sizes.policy, context.device, torch.bfloat16)
        model.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
        return vllm_lines(folder, models.prompts(context.sizes), context.sizes.generate_rows)


def vllm_lines(folder: str, prompts: list[list[int]], lines: tuple[tuple[int, int], ...]) -> dict:
    """Seconds a token of the model in `folder`, for (rows, tokens) each."""
    asked = Path(folder, "asked.json")
    asked.write_text(json.dumps({"prompts": prompts, "lines": lines}), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.gpu.vllm_line", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stderr[-400:]}")
    return json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
