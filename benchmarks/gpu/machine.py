"""Where figures come from: the command, the commit, the machine and what is installed on it."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from specrl.run.machine import machine as host

COMMIT = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")


def about(words: Sequence[str]) -> dict:
    """The command, the commit and the time, without asking for a GPU."""
    try:
        commit = subprocess.run(COMMIT, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:  # no git
        commit = None
    command = shlex.join(["python", "-m", "benchmarks.gpu", *words])
    return {"command": command, "commit": commit, "when": datetime.now(UTC).isoformat(timespec="seconds")}


def machine(device: torch.device) -> dict:
    """The device, the machine, and versions."""
    result = {**host(), "device": "CPU", "cuda": torch.version.cuda}
    if device.type == "cuda":
        result |= {"device": torch.cuda.get_device_name(device), "cudnn": torch.backends.cudnn.version()}
    return result
