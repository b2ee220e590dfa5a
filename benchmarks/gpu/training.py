"""Phase 7: GRPO in float32 with drafts and without must end with the same weights, byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu.run import Absent, Step, installed
from benchmarks.gpu.timing import Context

NEEDED = ("trl", "datasets", "math_verify")
"""What a training run imports besides; brought as wheels."""
START = """
import sys
import torch
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)
from specrl import train
from specrl.config import load as cli
from specrl.trainers.grpo import spare_vllm
spare_vllm()
raise SystemExit(cli.run(train.main, sys.argv[1:]))
"""
"""A run whose backward passes add up in one order: those of embeddings and fused attention do not on CUDA."""


def steps(context: Context) -> Iterator[Step]:
    yield Step("grpo", partial(grpo, context))


def grpo(context: Context) -> dict:
    lacking = [name for name in NEEDED if not installed(name)]
    if lacking:
        raise Absent(f"not installed: {', '.join(lacking)}")
    with tempfile.TemporaryDirectory() as folder:
        runs = {mode: _start(context, folder, mode) for mode in ("exact", "off")}  # at the same time: nothing is timed
        for mode, run in runs.items():
            output, _ = run.communicate()
            if run.returncode:
                raise RuntimeError(f"rollout.acceptance={mode} ended with {run.returncode}: {output[-400:]}")
        lines = Path(folder, "exact", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return verdict({mode: _digest(Path(folder, mode, "model", "model.safetensors")) for mode in runs}, lines)


def verdict(digests: Mapping[str, str], lines: Sequence[str]) -> dict:
    """Whether the weights are the same, in runs of which one reused text. Args: lines: of that one's metrics."""
    reused = [round(line["spec/reused_ratio"], 3) for line in map(json.loads, lines) if "spec/reused_ratio" in line]
    result = {**digests, "same": len(set(digests.values())) == 1, "reused_ratio": reused}
    if not result["same"]:
        return result | {"error": "the weights differ with drafts and without"}
    return result if any(reused) else result | {"error": "no draft was accepted, so equal weights show nothing"}


def _start(context: Context, folder: str, mode: str) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    words = [
        "config=grpo_math",
        f"name={mode}",
        f"output_dir={folder}",
        f"rollout.acceptance={mode}",
        "trainer.precision=fp32",
    ]
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": paths}
    if not context.cuda:
        env["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-c", START, *words, *context.sizes.train]
    return subprocess.Popen(command, cwd=root, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
