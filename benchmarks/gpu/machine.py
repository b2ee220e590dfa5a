"""Where figures come from: the command, the commit, the machine and what is installed on it."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

PACKAGES = ("torch", "transformers", "numpy", "pyarrow", "triton", "accelerate", "trl", "vllm")
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
COMMIT = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")


def about(words: Sequence[str]) -> dict:
    """Of a command, before anyone asks for a GPU."""
    command = shlex.join(["python", "-m", "benchmarks.gpu", *words])
    return {"command": command, "commit": _said(COMMIT), "when": datetime.now(UTC).isoformat(timespec="seconds")}


def machine(device: torch.device) -> dict:
    """The device, its driver, and versions."""
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        found = {"device": card.name, "memory_gb": round(card.total_memory / 1e9, 1), "driver": _said(DRIVER)}
        found |= {"multiprocessors": card.multi_processor_count, "cudnn": torch.backends.cudnn.version()}
    else:
        found = {"device": f"CPU, {torch.get_num_threads()} threads"}
    return {**found, "python": platform.python_version(), "cuda": torch.version.cuda} | dict(map(_version, PACKAGES))


def _version(package: str) -> tuple[str, str | None]:
    try:
        return package, importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return package, None


def _said(command: Sequence[str]) -> str | None:
    """What a command prints; None where there is no such command, or nothing to say."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None
