"""specrl's vLLM engine in a process of its own, for benchmarks/gpu/engines.py."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import model as models
from benchmarks.gpu.rollouts import figures
from benchmarks.process import serve
from specrl.rollout.build import build_engine
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.types import Request

SYNCS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
COUNTED = 24
"""Tokens of each response in the rollout whose passes are counted, and in the one that warms up."""


class Ours:
    """One engine.

    Args: opening: `folder` of the policy, `rows` and `longest` of a rollout; `drafter`, a folder or empty; `vllm`,
        options of rollout.vllm.
    """

    def __init__(self, opening: dict):
        self._cuda = torch.cuda.is_available()
        config = RolloutConfig(
            engine="vllm",
            max_new_tokens=opening["longest"],
            rows_per_batch=opening["rows"],
            drafter=opening["drafter"],
        )
        for name, value in opening["vllm"].items():
            setattr(config.vllm, name, value)
        self._spec = EngineSpec(
            eos_ids=frozenset(),
            rollout=config,
            model=opening["folder"],
            dtype="bfloat16" if self._cuda else "float32",
            device="cuda" if self._cuda else "cpu",
        )
        self._engine = build_engine(self._spec)

    def answer(self, message: dict) -> dict:
        """What the method `do` measures with the rest of the message."""
        return getattr(self, message.pop("do"))(**message)

    def rollout(self, prompts: list, lengths: list, old: list | None, plain: bool) -> dict:
        """One rollout after a warm-up, and the counts of a short one. Args: old: the texts to draft from."""
        requests = [replace(request, plain=plain) for request in models.plain(prompts, lengths, visit=1)]
        if old is not None:
            requests = models.drafted(requests, old)
        short = [replace(r, max_new_tokens=min(r.max_new_tokens, COUNTED)) for r in requests]
        self._engine.generate(short)
        self._engine.reset_cache()
        began = time.perf_counter()
        done, stats = self._engine.generate(requests)
        result = figures(done, stats, time.perf_counter() - began)
        self._engine.reset_cache()
        return result | {"counts": self._counts(short)}

    def _counts(self, requests: Sequence[Request]) -> dict:
        """What the host asked of the device, a pass: waits, launched graphs and kernels; on a CPU its operations."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        with profile(activities=activities) as tracer:
            _, stats = self._engine.generate(requests)
        names = Counter(event.name for event in tracer.events() if event.device_type == DeviceType.CPU)
        if self._cuda:
            kinds = {"syncs": SYNCS, "graphs": ("cudaGraphLaunch",), "kernels": ("cudaLaunch", "cuLaunch")}
        else:
            kinds = {"operations": ("aten::",)}
        counts = {kind: sum(n for name, n in names.items() if name.startswith(like)) for kind, like in kinds.items()}
        return {"passes": stats.passes} | {f"{kind}_a_pass": round(n / stats.passes, 1) for kind, n in counts.items()}

    def update(self, route: str) -> dict:
        """Seconds of three updates from a policy in this process. Args: route: of `Updates`."""
        from specrl.trainers.weights import PolicyWeights

        policy = self._spec.load(self._spec.model)
        self._engine.updates.route = route
        weights = PolicyWeights(policy)
        versions = range(self._engine.weight_version + 1, self._engine.weight_version + 4)
        seconds = [self._seconds(lambda v=version: self._engine.update_weights(weights, v)) for version in versions]
        mb = sum(p.numel() * p.element_size() for p in policy.parameters()) / 2**20
        return {"mb": round(mb, 1), "seconds": seconds}

    def nap(self) -> dict:
        """Seconds in which the engine falls asleep and wakes up, and the GPU memory that it gives back."""
        updates = self._engine.updates
        before = torch.cuda.mem_get_info()[0]
        asleep = self._seconds(updates.sleep)
        freed = torch.cuda.mem_get_info()[0] - before
        return {"sleep_s": asleep, "freed_gb": round(freed / 1e9, 2), "wake_s": self._seconds(updates.wake)}

    def _seconds(self, run: Callable[[], object]) -> float:
        began = time.perf_counter()
        run()
        if self._cuda:
            torch.cuda.synchronize()
        return round(time.perf_counter() - began, 4)

    def close(self) -> None:
        self._engine.close()


if __name__ == "__main__":
    serve(Ours)
