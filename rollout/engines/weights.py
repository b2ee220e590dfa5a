"""What an update of an engine's own weights must bring, and files in memory that carry one to other processes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from specrl.rollout.engines.base import DRAFTER, Meta, Source
from specrl.rollout.types import RolloutError

FILE_BYTES = 1 << 28  # held three times while a file is written


class WeightCheck:
    """Checks that an update brings all of the policy's weights, and all or none of its draft model's.

    Args: policy, drafter: the engine's models, also on the meta device.
    """

    def __init__(self, policy: PreTrainedModel, drafter: PreTrainedModel | None = None):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._tied: set[str] = set()
        """Copies of other weights: an update may bring them, the engine makes its own."""
        self._policy = self._add(policy)
        self._drafter = self._add(drafter, DRAFTER) if drafter is not None else set()

    def _add(self, model: PreTrainedModel, prefix: str = "") -> set[str]:
        """Notes the weights of a model; returns the names of those that an update needs."""
        tied = set(model.all_tied_weights_keys)
        self.shapes |= {prefix + name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._tied |= {prefix + name for name in tied}
        return {prefix + name for name, _ in model.named_parameters() if name not in tied}

    def before(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Checks weights that can be looked at before any is loaded: a Source, or tensors that are all in memory.

        Raises:
            RolloutError: as `checked`.
        """
        if isinstance(weights, Source):
            self.check(weights.metadata())
        elif isinstance(weights, Collection):
            self.check([Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights])

    def check(self, metadata: Sequence[Meta]) -> None:
        """Raises RolloutError as `checked`."""
        for _ in self.checked((meta.name, torch.empty(meta.shape, device="meta")) for meta in metadata):
            pass

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same tensors but for tied ones, each checked as it comes.

        Raises:
            RolloutError: a weight is unknown, missing, repeated or of another shape.
        """
        seen: set[str] = set()
        for name, tensor in weights:
            if name not in self.shapes:
                raise RolloutError(f"the update names the weight {name!r}, which the engine's model does not have")
            if tuple(tensor.shape) != self.shapes[name]:
                shapes = f"{tuple(tensor.shape)}, the engine's model has {self.shapes[name]}"
                raise RolloutError(f"the update gives the weight {name!r} the shape {shapes}")
            if name in seen:
                raise RolloutError(f"the update brings the weight {name!r} twice")
            seen.add(name)
            if name not in self._tied:
                yield name, tensor.detach()
        needed = self._policy if seen.isdisjoint(self._drafter) else self._policy | self._drafter
        if missing := needed - seen:
            raise RolloutError(f"the update lacks {len(missing)} of the model's weights, such as {min(missing)!r}")


@contextmanager
def in_memory_files(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[str]]:
    """Paths of safetensors files in memory with these weights, for processes of the same user on this machine.

    The files have no names, so the kernel frees them when the last process that reads them ends, however it ends.
    """
    with ExitStack() as stack:
        paths = []

        def write(part: dict[str, Tensor]) -> None:
            file = stack.enter_context(open(os.memfd_create("specrl-weights"), "wb"))
            file.write(save(part))
            file.flush()
            paths.append(f"/proc/{os.getpid()}/fd/{file.fileno()}")

        part: dict[str, Tensor] = {}
        for name, tensor in weights:
            part[name] = tensor.detach().to("cpu", copy=True).contiguous()
            if sum(t.nbytes for t in part.values()) > FILE_BYTES:
                write(part)
                part = {}
        if part:
            write(part)
        yield paths
