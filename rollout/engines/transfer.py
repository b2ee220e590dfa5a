"""How new weights reach engines that have their own copy: the route depends on where both sides compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from specrl.rollout.engines.base import Probe

Route = Literal["process", "ipc", "nccl", "memory"]


class Meta(NamedTuple):
    """A weight that an update will bring."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@runtime_checkable
class Source(Protocol):
    """Weights that can be walked again, with the same values until the next update. What vLLM calls a WeightSource."""

    collective: bool
    """Every training process has to walk at the same time, as each holds a part."""

    def metadata(self) -> list[Meta]:
        """The weights that walking yields, in that order; nothing is gathered, merged or copied."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor), one at a time."""


@runtime_checkable
class Receives(Protocol):
    """Implemented by `updates` of an Engine to which another process can send weights from GPU to GPU."""

    gpus: tuple[str, ...]
    """UUID of the GPU of each rank; empty on a CPU."""

    def join(self, route: Route, init: dict[str, Any]) -> None:
        """Connects to the sender, as vLLM's `init_weight_transfer_engine` does."""

    def begin_update(self, version: int, metadata: Sequence[Meta]) -> None:
        """Raises RolloutError, with nothing loaded, when these weights do not fit the model."""

    def receive(self, update: dict[str, Any]) -> None:
        """Receives one chunk. Returns when the sender has sent it."""

    def finish_update(self, version: int, probe: Probe | None) -> None:
        """As the end of Engine.update_weights."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Where trainer and engines compute. A GPU is named by its UUID; empty means none."""

    trainer: str
    workers: tuple[str, ...]
    """Of each rank of each engine; empty where an engine cannot receive."""
    num_workers: int
    """Engines in other processes; 0: one engine, in the trainer's process."""
    tensor_parallel: int = 1
    """Ranks of an engine; those of workers are all in `workers`."""
    trainers: int = 1
    """Training processes."""


def choose_route(topology: Topology) -> tuple[Route, str]:
    """The route for the weights, and why.

    process: live tensors. ipc: the trainer's GPU memory, opened by the workers. nccl: broadcast from GPU to GPU.
    memory: a copy in the host's shared memory, which works everywhere.
    """
    if topology.num_workers == 0 and topology.tensor_parallel == 1:
        return "process", "the engine's worker lives in the trainer's process"
    if topology.num_workers == 0:
        return "memory", "the ranks of a tensor-parallel engine are processes, of which one shares the trainer's GPU"
    if not topology.trainer:
        return "memory", "the trainer has no GPU"
    if not all(topology.workers):
        return "memory", "there are workers without a GPU, or whose engine receives nothing"
    if set(topology.workers) == {topology.trainer}:
        if topology.trainers > 1:  # vLLM merges the handles of all processes, which need not all have chosen this way
            return "memory", f"CUDA IPC is used from one trainer process only, not from {topology.trainers}"
        return "ipc", "all workers share the trainer's GPU"
    if len({topology.trainer, *topology.workers}) == 1 + len(topology.workers):
        return "nccl", "every rank has a GPU of its own"
    return "memory", "NCCL needs a GPU for each rank, and only some of them share the trainer's"
