"""One rollout worker, an engine in a process of its own, and the share of work that it gets. Knows nothing of Ray."""

from __future__ import annotations

import heapq
import os
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from specrl.rollout.engines.base import Engine, EngineSpec, Probe, out_of_memory
from specrl.rollout.engines.transfer import Meta, Receives, Route
from specrl.rollout.types import AheadText, Completion, EngineStats, Request, RolloutError

Arrays = dict[str, tuple[np.ndarray, torch.dtype, tuple[int, ...]]]
Share = list[list[int]]
"""Rows of one call, grouped by prompt."""


class StaleWeights(RolloutError):
    """A worker was asked for text of a weight version that it does not have."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What comes back instead of a result."""

    kind: Literal["stale", "memory", "rows", "broken", "lost"]
    """`rows`: the engine failed on these rows. `broken`: it can do nothing any more. `lost`: its process died or
    hangs."""
    reason: str
    traceback: str = ""
    """Empty for errors whose message says it all."""

    def __str__(self) -> str:
        return f"{self.reason}\n{self.traceback}".strip()


@dataclass(frozen=True, slots=True)
class Started:
    """Where a worker runs."""

    pid: int
    gpu: str
    """UUID of the GPU that it computes on; empty for none."""
    ahead: bool
    """Its engine can be stopped between passes."""
    gpus: tuple[str, ...] = ()
    """UUID of the GPU of each rank of an engine that receives weights; empty where it does not."""


class RolloutWorker:
    """One engine in a process of its own. `run` and, beside it from another thread, `halt` are called from outside."""

    def __init__(self, index: int):
        self.index, self._halted = index, 0
        self.engine: Engine | None = None
        self.version: int | None = None
        """None while the engine holds unproven weights."""

    def run(self, method: str, *args: Any) -> Any | Failure:
        """The method's result. Errors come back as a Failure: not every exception can travel."""
        try:
            return getattr(self, method)(*args)
        except Exception as error:
            known = isinstance(error, RolloutError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            return Failure(self._kind(error), reason, "" if known else traceback.format_exc())

    def start(
        self,
        build: Callable[[EngineSpec], Engine],
        spec: EngineSpec,
        threads: int,
        arrays: Arrays | None,
        version: int,
        probe: Probe | None,
    ) -> Started:
        """Builds the engine, and loads the pool's weights if it has any yet."""
        torch.set_num_threads(threads)
        self.engine = build(spec)
        if arrays is None and version == self.engine.weight_version:
            self.version = version  # those of the model's files
        else:
            self.update_weights(arrays, version, probe)
        updates = getattr(self.engine, "updates", None)
        gpus = updates.gpus if isinstance(updates, Receives) else ()
        return Started(os.getpid(), gpu(), hasattr(self.engine, "ahead"), gpus)

    def update_weights(self, arrays: Arrays | None, version: int, probe: Probe | None) -> None:
        self.version = None
        self.engine.update_weights(None if arrays is None else to_tensors(arrays), version, probe)
        self.version = version

    def join(self, route: Route, init: dict[str, Any]) -> None:
        """See Receives, as of the three that follow."""
        self.engine.updates.join(route, init)

    def begin_update(self, version: int, metadata: Sequence[Meta]) -> None:
        self.version = None
        self.engine.updates.begin_update(version, metadata)

    def receive(self, update: dict[str, Any]) -> None:
        self.engine.updates.receive(update)

    def finish_update(self, version: int, probe: Probe | None) -> None:
        self.engine.updates.finish_update(version, probe)
        self.version = version

    def generate(self, version: int, requests: Sequence[Request]) -> tuple[list[Completion], EngineStats]:
        return self._engine_at(version).generate(requests)

    def ahead(self, version: int, number: int, requests: Sequence[Request]) -> tuple[list[AheadText], float]:
        """What there is of each response when all have ended or `halt` was called, and the seconds it took.

        Args: number: of this call, later ones have higher numbers.
        """
        began = time.perf_counter()
        texts = self._engine_at(version).ahead(requests, stop=lambda: self._halted >= number)
        return texts, time.perf_counter() - began

    def halt(self, number: int) -> None:
        """Ends the calls of `ahead` up to `number` before their next pass, also such as have not begun."""
        self._halted = max(self._halted, number)

    def score(self, version: int, tokens: Sequence[int]) -> list[float]:
        return self._engine_at(version).score(tokens)

    def reset_cache(self) -> None:
        self.engine.reset_cache()

    def _engine_at(self, version: int) -> Engine:
        if version != self.version:
            raise StaleWeights(f"worker {self.index} has weight version {self.version}, not {version}")
        return self.engine

    def _kind(self, error: Exception) -> str:
        if isinstance(error, StaleWeights):
            return "stale"
        if out_of_memory(error):
            return "memory"
        try:  # rows are to blame only if the engine still works without them
            self.engine.score((0, 0))
        except Exception:
            return "broken"
        return "rows"


def gpu() -> str:
    """UUID of the GPU that this process computes on; empty for none."""
    if not torch.cuda.is_initialized():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def spread(requests: Sequence[Request], shares: int) -> list[Share]:
    """Cuts requests into at most `shares` shares of like work, the longest first.

    Rows of one prompt stay together, as they share its prefill. The prompt with the most expected tokens goes first,
    each to the share with the least so far (longest processing time first: at most 4/3 of the best longest share).
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    work: Counter[tuple[int, ...]] = Counter()
    for i, request in enumerate(requests):
        prompt, tokens = tuple(request.prompt), request.expected_tokens
        groups.setdefault(prompt, []).append(i)
        work[prompt] += request.max_new_tokens if tokens is None else tokens
    heap: list[tuple[int, int, Share]] = [(0, n, []) for n in range(min(shares, len(groups)))]
    for prompt in sorted(groups, key=work.__getitem__, reverse=True):
        load, n, share = heap[0]
        share.append(groups[prompt])
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
    """The inverse of `to_arrays`. The tensors may lie in shared memory: copy, never write."""
    for name, (array, dtype, shape) in arrays.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(array)
        yield name, flat.view(dtype).reshape(shape)
