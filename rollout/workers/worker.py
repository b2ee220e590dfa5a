"""One rollout worker, an engine in its own process, and its share of the work. Knows nothing of Ray."""

from __future__ import annotations

import heapq
import os
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specrl.rollout.engines.base import NO_WEIGHTS, Engine, EngineSpec, Meta, Probe
from specrl.rollout.types import AheadText, Completion, EngineStats, Request, RolloutError

Arrays = dict[str, tuple[np.ndarray, torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Where a worker runs."""

    pid: int
    gpu: str
    """UUID of the GPU that it computes on; empty for none."""
    rank_gpus: tuple[str, ...] = ()
    """UUID of the GPU of each rank of an engine that receives weights; empty where it does not."""
    fill: int = 0
    """See FillsPasses; 0 for other engines."""


class RolloutWorker:
    """One engine in its own process. `run`, and concurrently `halt` from another thread, are called from outside."""

    engine: Any
    """An Engine. `start` builds it."""

    def __init__(self, index: int):
        self.index = index
        self.version: int | None = None
        """None while the weights of the engine are not proven."""
        self._halted = 0

    def run(self, method: str, *args: Any) -> Any:
        """The method's result.

        Raises:
            RolloutError: any exception, as not every one can be serialized: the message of a RolloutError, the
                traceback of another.
        """
        try:
            return getattr(self, method)(*args)
        except Exception as error:
            reason = str(error) if isinstance(error, RolloutError) else traceback.format_exc()
            raise RolloutError(reason) from None

    def start(
        self,
        build: Callable[[EngineSpec], Engine],
        spec: EngineSpec,
        threads: int,
        arrays: Arrays | None,
        version: int,
        probe: Probe | None,
    ) -> WorkerInfo:
        """Builds the engine, and loads the pool's weights if it has any yet."""
        torch.set_num_threads(threads)
        self.engine = build(spec)
        self.update_weights(arrays, version, probe)
        updates = getattr(self.engine, "updates", None)
        return WorkerInfo(os.getpid(), gpu_uuid(), updates.gpus if updates else (), getattr(self.engine, "fill", 0))

    def update_weights(self, arrays: Arrays | None, version: int, probe: Probe | None) -> None:
        """Args: arrays: None for the weights of the model's files, which no update has replaced."""
        self.version = None
        if arrays is not None:
            self.engine.update_weights([*to_tensors(arrays)], version, probe)
        elif version != self.engine.weight_version:
            raise RolloutError(NO_WEIGHTS)
        self.version = version

    def join(self, route: str, init: dict[str, Any]) -> None:
        """See Updates of rollout/engines/vllm/weights.py, also for the next three methods."""
        self.engine.updates.join(route, init)

    def begin_update(self, version: int, metadata: Sequence[Meta]) -> None:
        self.version = None
        self.engine.updates.begin_update(version, metadata)

    def receive(self, update: dict[str, Any]) -> None:
        self.engine.updates.receive(update)

    def finish_update(self, version: int, probe: Probe | None) -> None:
        self.engine.updates.finish_update(version, probe)
        self.version = version

    def generate(
        self, version: int, requests: Sequence[Request], beside: Sequence[Request] = ()
    ) -> tuple[list[Completion], EngineStats, list[AheadText]]:
        """Args: beside: rows of the next batch for the passes of an engine that fills them; their texts come last."""
        self._check_version(version)
        if not beside:
            return *self.engine.generate(requests), []
        self.engine.begin(beside)
        completions, stats = self.engine.generate(requests)
        texts, _ = self.engine.stop()
        return completions, stats, [texts.get(request.key, AheadText((), None)) for request in beside]

    def ahead(self, version: int, call: int, requests: Sequence[Request]) -> tuple[list[AheadText], float]:
        """The responses so far when all have ended or `halt` was called, and the seconds it took.

        Args: call: number of this call; later ones have higher numbers.
        """
        began = time.perf_counter()
        self._check_version(version)
        texts = self.engine.ahead(requests, stop=lambda: self._halted >= call)
        return texts, time.perf_counter() - began

    def halt(self, call: int) -> None:
        """Ends the calls of `ahead` up to this number before their next pass, also those that have not begun."""
        self._halted = max(self._halted, call)

    def score(self, version: int, tokens: Sequence[int]) -> list[float]:
        self._check_version(version)
        return self.engine.score(tokens)

    def _check_version(self, version: int) -> None:
        if version != self.version:
            raise RolloutError(f"worker {self.index} has weight version {self.version}, not {version}")


def gpu_uuid() -> str:
    """UUID of the GPU that this process computes on; empty for none."""
    if not torch.cuda.is_initialized():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def split_work(requests: Sequence[Request], shares: int) -> list[list[int]]:
    """Splits requests, by their indices, into at most `shares` shares of similar work, the longest first.

    Rows of one prompt stay together because they share its prefill. Prompts are assigned in order of decreasing
    expected tokens, each to the share with the fewest so far.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    work: Counter[tuple[int, ...]] = Counter()
    for i, request in enumerate(requests):
        prompt, tokens = tuple(request.prompt), request.expected_tokens
        groups.setdefault(prompt, []).append(i)
        work[prompt] += request.max_new_tokens if tokens is None else tokens
    heap: list[tuple[int, int, list[int]]] = [(0, n, []) for n in range(min(shares, len(groups)))]
    for prompt in sorted(groups, key=work.__getitem__, reverse=True):
        load, n, share = heap[0]
        share += groups[prompt]
        heapq.heapreplace(heap, (load + work[prompt], n, share))
    return [share for _, _, share in sorted(heap, key=lambda entry: (-entry[0], entry[1]))]


def to_arrays(weights: Iterable[tuple[str, Tensor]]) -> Arrays:
    """Weights as bytes with their dtype and shape: Ray shares numpy arrays without a copy, but not bfloat16."""
    arrays = {}
    for name, tensor in weights:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        arrays[name] = flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)
    return arrays


def to_tensors(arrays: Arrays) -> Iterator[tuple[str, Tensor]]:
    """The inverse of `to_arrays`. The tensors may be in shared memory: copy, never write."""
    for name, (array, dtype, shape) in arrays.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(array)
        yield name, flat.view(dtype).reshape(shape)
