"""Weights, optimiser and progress of co-training in a checkpoint: safetensors and JSON, nothing is pickled.

A run resumes only from files whose digests are those of its checkpoint's marker, so they are read without other checks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specrl.rollout.types import RolloutError

WEIGHTS = "trained.safetensors"
OPTIMIZER = "optimizer.safetensors"
PROGRESS = "progress.json"

Weights = Mapping[str, torch.nn.Parameter]
"""Parameters by name, each once."""


def save(folder: Path, weights: Weights, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
    """Writes the weights, their optimiser state as NAME/KEY, and `progress`, which must be JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        f"{name}/{key}": value
        for name, weight in weights.items()
        for key, value in optimizer.state.get(weight, {}).items()
    }
    for file, tensors in ((WEIGHTS, weights), (OPTIMIZER, state)):
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / file)
    (folder / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")


@torch.no_grad()
def load(folder: Path, weights: Weights, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restores what `save` wrote into weights and an optimiser that were built the same way; returns `progress`.

    Raises:
        RolloutError: the files are of another model; nothing was changed.
    """
    saved = load_file(folder / WEIGHTS)
    states = load_file(folder / OPTIMIZER)
    for name in sorted(saved.keys() | weights.keys()):
        there, here = (tuple(part[name].shape) if name in part else "absent" for part in (saved, weights))
        if there != here:
            raise RolloutError(
                f"{folder} is of another model: {name!r} is {there} there and {here} here. Resume with the model and "
                "the drafter that the run began with"
            )
    for name, weight in weights.items():
        weight.copy_(saved[name])
    for path, value in states.items():
        name, _, key = path.rpartition("/")
        weight = weights[name]
        optimizer.state[weight][key] = value if key == "step" else value.to(weight.device)  # AdamW counts on the CPU
    return json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
