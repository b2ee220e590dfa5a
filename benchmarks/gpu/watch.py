"""Seconds of the engine's passes, as its budget observes them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.timing import Context, ms, synchronize
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.types import Request

LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch")


class Pass(NamedTuple):
    """One pass of an engine, as it measured it."""

    rows: int
    tokens: int
    width: int
    seconds: float


class Enough(Exception):
    """The passes to be observed are done."""


class Watched(Drafting):
    """Drafting that records the engine's passes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.passes: list[Pass] = []
        self.after_pass: Callable[[int], None] = lambda done: None
        """Called after every pass with the number of passes so far."""
        self._observe = self.budget.observe_pass
        self.budget.observe_pass = self._keep

    def _keep(self, tokens: int, seconds: float, rows: int = 0, width: int = 0, *more, **named) -> None:
        self._observe(tokens, seconds, rows, width, *more, **named)
        self.passes.append(Pass(rows, tokens, width, seconds))
        self.after_pass(len(self.passes))


class Wrong:
    """Drafts random tokens, as many as allowed."""

    source = "wrong"

    def __init__(self, vocab: int, seed: int):
        self._vocab, self._random = vocab, random.Random(seed)

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(limit)]


def profiled(context: Context, engine: TransformersEngine, requests: Sequence[Request], skip: int, count: int) -> dict:
    """`count` passes of a rollout under the profiler, after its first `skip` passes.

    `device_ms` is the time in which some kernel ran; under the profiler passes take longer than they do alone, so
    `busy` is against the seconds of the same passes without it.
    """
    watched: Watched = engine.drafting
    alone = [p.seconds for p in _passes(watched, engine, requests, skip + count, lambda done: None)[skip:]]
    activity = ProfilerActivity.CUDA if context.cuda else ProfilerActivity.CPU
    tracer, began = profile(activities=[activity]), [0.0, 0.0]

    def profile_window(done: int) -> None:
        if done == skip:
            synchronize(context.device)
            tracer.start()
            began[0] = time.perf_counter()
        elif done == skip + count:
            synchronize(context.device)
            began[1] = time.perf_counter()
            tracer.stop()

    seen = _passes(watched, engine, requests, skip + count, profile_window)[skip:]
    events = tracer.events()
    result = {"rows": seen[0].rows, "tokens": round(sum(p.tokens for p in seen) / count), "passes": count}
    result |= {"ms": ms(sum(alone) / count), "profiled_ms": ms((began[1] - began[0]) / count)}
    if not context.cuda:
        return result | {"operations": round(sum(e.name.startswith("aten::") for e in events) / count)}
    kernels = [e.time_range for e in events if e.device_type == DeviceType.CUDA]
    if not kernels:
        return result | {"error": "the profiler saw no kernel"}
    device = _union([(k.start, k.end) for k in kernels]) / 1e6 / count
    launches = sum(e.device_type == DeviceType.CPU and e.name.startswith(LAUNCHES) for e in events)
    result |= {"kernels": round(len(kernels) / count), "launches": round(launches / count), "device_ms": ms(device)}
    return result | {"busy": round(device * count / sum(alone), 3)}


def _passes(
    watched: Watched,
    engine: TransformersEngine,
    requests: Sequence[Request],
    count: int,
    after_pass: Callable[[int], None],
) -> list[Pass]:
    """The first `count` passes of a rollout, which then ends. Args: after_pass: called after each."""

    def then(done: int) -> None:
        after_pass(done)
        if done == count:
            raise Enough

    watched.passes.clear()
    watched.after_pass = then
    try:
        engine.generate(requests)
    except Enough:
        return watched.passes[:count]
    finally:
        watched.after_pass = lambda done: None
    raise RuntimeError(f"a rollout of {len(watched.passes)} passes; {count} are to be seen")


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Length of what the spans cover together."""
    total, reached = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return total


def free_bytes(context: Context) -> float:
    """Memory of the device that is free, or could be."""
    if not context.cuda:
        return float("inf")
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(context.device)[0]
