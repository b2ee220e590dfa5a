"""Weights, optimiser and progress in a checkpoint of PPO or co-training: safetensors and JSON, nothing is pickled.

A run resumes only from files whose digests are those of its checkpoint's marker, so they are read without other checks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specrl.rollout.types import RolloutError

WEIGHTS = "trained.safetensors"
OPTIMIZER = "optimizer.safetensors"
PROGRESS = "progress.json"

Weights = Mapping[str, torch.nn.Parameter]
"""Parameters by name, each once."""


def save(
    folder: Path, weights: Weights, optimizer: torch.optim.Optimizer, progress: dict[str, Any], writes: bool = True
) -> None:
    """Writes the weights, their optimiser state as NAME/KEY, and `progress`, which must be JSON.

    Args: writes: False in the other processes of a sharded model, which take part in gathering only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        f"{name}/{key}": value
        for name, weight in weights.items()
        for key, value in optimizer.state.get(weight, {}).items()
    }
    for file, tensors in ((WEIGHTS, weights), (OPTIMIZER, state)):
        kept = {name: whole for name, tensor in tensors.items() if (whole := _whole(tensor, writes)) is not None}
        if writes:
            save_file(kept, folder / file)
    if writes:
        (folder / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")


def _whole(tensor: Any, keep: bool) -> Tensor | None:
    """All of a tensor, gathered on the host if it is sharded; None if it is not to be kept."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
        tensor = tensor.cpu() if keep else None
    return tensor.contiguous() if keep else None


def _like(value: Tensor, weight: Any) -> Tensor:
    """A whole tensor on the device of a weight, or the part of it that this process holds of a sharded weight."""
    value = value.to(weight.device)
    if not hasattr(weight, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)


@torch.no_grad()
def load(folder: Path, weights: Weights, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restores what `save` wrote into weights and an optimiser that were built the same way; returns `progress`.

    Every process reads the files, one tensor at a time.

    Raises:
        RolloutError: the files are of another model; nothing was changed.
    """
    with safe_open(folder / WEIGHTS, "pt") as saved, safe_open(folder / OPTIMIZER, "pt") as states:
        there = {name: tuple(saved.get_slice(name).get_shape()) for name in saved.offset_keys()}
        here = {name: tuple(weight.shape) for name, weight in weights.items()}
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                raise RolloutError(
                    f"{folder} is of another model: {name!r} is {there.get(name, 'absent')} there and "
                    f"{here.get(name, 'absent')} here. Resume with the model and the drafter that the run began with"
                )
        for name, weight in weights.items():
            weight.copy_(_like(saved.get_tensor(name), weight))
        for path in states.offset_keys():
            name, _, key = path.rpartition("/")
            value = states.get_tensor(path)
            # AdamW counts on the CPU
            optimizer.state[weights[name]][key] = value if key == "step" else _like(value, weights[name])
    return json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
