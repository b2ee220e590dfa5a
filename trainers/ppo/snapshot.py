"""What a trainer must have back to go on: weights and optimiser moments as safetensors, the rest as JSON. No pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specrl.rollout.types import RolloutError

WEIGHTS, MOMENTS, PROGRESS = "trained.safetensors", "optimizer.safetensors", "progress.json"


def save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
    """Writes the trained parameters by name, their optimiser state as NAME/KEY, and `progress`, which must be JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = _trained(model)
    moments = {f"{name}/{key}": value for name, p in trained.items() for key, value in optimizer.state[p].items()}
    for file, tensors in ((WEIGHTS, trained), (MOMENTS, moments)):
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / file)
    (folder / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")


@torch.no_grad()
def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Puts back what `save` wrote into a model and an optimiser built the same way, and returns `progress`.

    Raises:
        RolloutError: a file is missing, damaged, or of another model.
    """
    trained = _trained(model)
    try:
        weights, moments = load_file(folder / WEIGHTS), load_file(folder / MOMENTS)
        progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, SafetensorError, ValueError) as error:
        raise RolloutError(
            f"the checkpoint {folder} cannot be read: {error}. Remove it to resume from an older one"
        ) from error
    if weights.keys() != trained.keys() or any(weights[name].shape != p.shape for name, p in trained.items()):
        odd = sorted(weights.keys() ^ trained.keys()) or [n for n, p in trained.items() if weights[n].shape != p.shape]
        raise RolloutError(f"the checkpoint {folder} is of another model: the two differ in {odd[0]!r}")
    for name, p in trained.items():
        p.copy_(weights[name])
    for key, value in moments.items():
        name, _, role = key.rpartition("/")
        p = trained[name]
        optimizer.state[p][role] = value if role == "step" else value.to(p.device)  # AdamW counts steps on the CPU
    return progress


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The trained parameters by name, each once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
