"""The state of co-training on disk: weights and moments as safetensors, the rest as JSON in the same file's header."""

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

STATE, MOMENTS, STATES = "drafter.safetensors", "adamw/", "states/"


@dataclass(slots=True)
class Progress:
    """What a resumed trainer knows besides weights and texts."""

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
    for i, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"{MOMENTS}{i}/{name}": value for name, value in moments.items()}
    tensors |= {f"{STATES}{i}": read.states for i, read in enumerate(reads)}
    told = {"progress": json.dumps(asdict(progress)), "texts": json.dumps([asdict(read.text) for read in reads])}
    blob = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, told)
    write_durably(directory / STATE, blob)


@torch.no_grad()
def load(directory: Path, weights: Mapping[str, Tensor], optimizer: Optimizer) -> tuple[Progress, list[Read]]:
    """Copies what `save` wrote into `weights` and `optimizer`, and returns the rest.

    Raises:
        RolloutError: it is missing, damaged or another drafter's; nothing was changed.
    """
    try:
        with safe_open(directory / STATE, "pt") as file:
            told = file.metadata()
        tensors = safetensors.torch.load_file(directory / STATE)
        progress = Progress(**json.loads(told["progress"]))
        texts = [Text(tuple(t["prompt"]), tuple(t["response"]), t["version"]) for t in json.loads(told["texts"])]
        device = next(iter(weights.values())).device
        reads = [Read(text, tensors.pop(f"{STATES}{i}").to(device)) for i, text in enumerate(texts)]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RolloutError(
            f"the co-training state in {directory} cannot be read: {error}. Resume from an older checkpoint"
        ) from error
    moments: dict[int, dict[str, Tensor]] = {}
    for name in [name for name in tensors if name.startswith(MOMENTS)]:
        _, i, moment = name.split("/")
        moments.setdefault(int(i), {})[moment] = tensors.pop(name)
    for name in sorted(weights.keys() | tensors.keys()):
        here, there = (tuple(side[name].shape) if name in side else "absent" for side in (weights, tensors))
        if here != there:
            raise RolloutError(
                f"the saved co-training state belongs to another drafter: {name} is {there} there and {here} here. "
                "Resume with the drafter and the options that the run began with"
            )
    for name, tensor in weights.items():
        tensor.copy_(tensors[name])
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    return progress, reads
