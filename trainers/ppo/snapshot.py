"""Checkpoints of PPO: weights and optimiser state as safetensors, everything else as JSON. Nothing is pickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specrl.rollout.types import RolloutError

WEIGHTS = "trained.safetensors"
OPTIMIZER = "optimizer.safetensors"
PROGRESS = "progress.json"


def save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
    """Writes the trained parameters by name, their optimiser state as NAME/KEY, and `progress`, which must be JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = _trained(model)
    state = {f"{name}/{key}": value for name, p in trained.items() for key, value in optimizer.state[p].items()}
    for file, tensors in ((WEIGHTS, trained), (OPTIMIZER, state)):
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / file)
    (folder / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")


@torch.no_grad()
def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restores what `save` wrote into a model and an optimiser that were built the same way; returns `progress`.

    Raises:
        RolloutError: a file is missing, damaged, or of another model.
    """
    trained = _trained(model)
    try:
        weights = load_file(folder / WEIGHTS)
        state = load_file(folder / OPTIMIZER)
        progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, SafetensorError, ValueError) as error:
        raise RolloutError(
            f"the checkpoint {folder} cannot be read: {error}. Remove it to resume from an older one"
        ) from error
    differing = sorted(weights.keys() ^ trained.keys())
    differing = differing or [name for name, p in trained.items() if weights[name].shape != p.shape]
    if differing:
        raise RolloutError(f"the checkpoint {folder} is of another model: the two differ in {differing[0]!r}")
    for name, p in trained.items():
        p.copy_(weights[name])
    for path, value in state.items():
        name, _, key = path.rpartition("/")
        p = trained[name]
        optimizer.state[p][key] = value if key == "step" else value.to(p.device)  # AdamW counts steps on the CPU
    return progress


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The trained parameters by name, each once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
