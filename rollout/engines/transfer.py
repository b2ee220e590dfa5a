"""How new weights get to engines with a copy of their own: the way is chosen by where both sides compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from specrl.rollout.engines.base import Probe

Route = Literal["process", "ipc", "nccl", "memory"]


class Meta(NamedTuple):
    """A weight that will come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@runtime_checkable
class Source(Protocol):
    """Weights that can be walked again, with the same values until the next update. What vLLM calls a WeightSource."""

    collective: bool
    """Every process that trains has to walk at the same time, as each holds a part."""

    def metadata(self) -> list[Meta]:
        """What walking yields, in that order; nothing is gathered, merged or copied."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor), one at a time."""


@runtime_checkable
class Receives(Protocol):
    """What an Engine has besides if another process can send it weights without the host's memory."""

    gpus: tuple[str, ...]
    """UUID of the GPU of each rank; empty on a CPU."""

    def join(self, route: Route, init: dict[str, Any]) -> None:
        """Connects to the sender, as vLLM's `init_weight_transfer_engine` does."""

    def begin_update(self, version: int, metadata: Sequence[Meta]) -> None:
        """Raises RolloutError, with nothing loaded, when what is to come does not fit."""

    def receive(self, update: dict[str, Any]) -> None:
        """Takes one chunk. It ends when the sender has sent it."""

    def finish_update(self, version: int, probe: Probe | None) -> None:
        """As the end of Engine.update_weights."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Where trainer and engines compute. A GPU is named by its UUID; empty means none."""

    trainer: str
    workers: tuple[str, ...]
    """Of each rank of each engine; empty where an engine cannot receive."""
    num_workers: int
    """Engines in processes of their own; 0: one, in the trainer's."""
    tensor_parallel: int = 1
    """Ranks of an engine; those of workers are all in `workers`."""
    trainers: int = 1
    """Processes that train."""


def choose_route(at: Topology) -> tuple[Route, str]:
    """The way for the weights, and why.

    process: live tensors. ipc: the trainer's GPU memory, opened by the workers. nccl: broadcast from GPU to GPU.
    memory: a copy in the host's shared memory, which works everywhere.
    """
    if at.num_workers == 0 and at.tensor_parallel == 1:
        return "process", "the engine's worker lives in the trainer's process"
    if at.num_workers == 0:
        return "memory", "the ranks of a tensor-parallel engine are processes, of which one shares the trainer's GPU"
    if not at.trainer:
        return "memory", "the trainer has no GPU"
    if not all(at.workers):
        return "memory", "there are workers without a GPU, or whose engine receives nothing"
    if set(at.workers) == {at.trainer}:
        if at.trainers > 1:  # vLLM merges the handles of all processes, which need not all have chosen this way
            return "memory", f"CUDA IPC is used from one trainer process only, not from {at.trainers}"
        return "ipc", "all workers share the trainer's GPU"
    if len({at.trainer, *at.workers}) == 1 + len(at.workers):
        return "nccl", "every rank has a GPU of its own"
    return "memory", "NCCL needs a GPU for each rank, and only some of them share the trainer's"
