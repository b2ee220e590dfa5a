"""The state of co-training on disk: one safetensors file, whose header has everything but tensors as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim import Optimizer

from specrl.rollout.durable import write_durably
from specrl.rollout.types import RolloutError
from specrl.trainers.cotraining.texts import Read, Text

STATE = "drafter.safetensors"
OPTIMIZER = "adamw/"
STATES = "states/"


@dataclass(slots=True)
class Progress:
    """What a resumed trainer needs besides weights and texts."""

    steps: int = 0
    rollouts: int = 0
    rounds: int = 0
    agreement: float | None = None
    """Smoothed keyed agreement with the policy, None before the first round."""
    agreement_initial: float | None = None
    best: float = 0.0
    collapsed: bool = False
    window: list[list[float]] = field(default_factory=list)
    """[seconds spent, seconds saved] of the latest rollouts."""
    off: str = ""
    """Why co-training has ended; empty while it runs."""


def save(
    directory: Path, weights: Mapping[str, Tensor], optimizer: Optimizer, progress: Progress, reads: Sequence[Read]
) -> None:
    """Writes all of it into one file."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict(weights)
    for i, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{OPTIMIZER}{i}/{name}": value for name, value in state.items()}
    tensors |= {f"{STATES}{i}": read.states for i, read in enumerate(reads)}
    texts = [asdict(read.text) for read in reads]
    metadata = {"progress": json.dumps(asdict(progress)), "texts": json.dumps(texts)}
    blob = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    write_durably(directory / STATE, blob)


@torch.no_grad()
def load(directory: Path, weights: Mapping[str, Tensor], optimizer: Optimizer) -> tuple[Progress, list[Read]]:
    """Copies what `save` wrote into `weights` and `optimizer`, and returns the rest.

    Raises:
        RolloutError: it is missing, damaged or another drafter's; nothing was changed.
    """
    try:
        with safe_open(directory / STATE, "pt") as file:
            metadata = file.metadata()
        tensors = safetensors.torch.load_file(directory / STATE)
        progress = Progress(**json.loads(metadata["progress"]))
        texts = [Text(tuple(t["prompt"]), tuple(t["response"]), t["version"]) for t in json.loads(metadata["texts"])]
        device = next(iter(weights.values())).device
        reads = [Read(text, tensors.pop(f"{STATES}{i}").to(device)) for i, text in enumerate(texts)]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RolloutError(
            f"the co-training state in {directory} cannot be read: {error}. Resume from an older checkpoint"
        ) from error
    state: dict[int, dict[str, Tensor]] = {}
    for name in [name for name in tensors if name.startswith(OPTIMIZER)]:
        _, i, key = name.split("/")
        state.setdefault(int(i), {})[key] = tensors.pop(name)
    for name in sorted(weights.keys() | tensors.keys()):
        shapes = [tuple(side[name].shape) if name in side else "absent" for side in (tensors, weights)]
        if shapes[0] != shapes[1]:
            raise RolloutError(
                f"the saved co-training state belongs to another drafter: {name} is {shapes[0]} there and {shapes[1]} "
                "here. Resume with the drafter and the options that the run began with"
            )
    for name, tensor in weights.items():
        tensor.copy_(tensors[name])
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return progress, reads
