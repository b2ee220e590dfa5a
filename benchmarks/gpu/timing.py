"""Seconds of work on a device, by the device's clock where it has one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.run import Absent, Report
from benchmarks.gpu.sizes import Sizes


@dataclass(frozen=True)
class Context:
    """The device, the sizes and the report of a phase."""

    device: torch.device
    sizes: Sizes
    report: Report
    """Has the figures of earlier phases."""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def needs_cuda(self, what: str) -> None:
        """Raises Absent elsewhere."""
        if not self.cuda:
            raise Absent(f"{what}: only on CUDA")

    def figure(self, *path: str) -> Any:
        """A figure of an earlier phase, or None. Args: path: the phase, and keys in its figures."""
        phase, *keys = path
        inner = self.report.content["phases"].get(phase, {}).get("figures", {})
        for key in keys:
            inner = inner.get(key) if isinstance(inner, dict) else None
        return inner


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds until the device is done with it, host time included."""
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def busy(run: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Seconds on the device, between two events in its stream; the median, after a warm-up. A CPU's are by the wall."""
    run()
    if device.type != "cuda":
        return statistics.median(wall(run, device) for _ in range(repeats))
    result = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        result.append(first.elapsed_time(last) / 1e3)
    return statistics.median(result)


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)


def peak_mb(run: Callable[[], Any], device: torch.device) -> float | None:
    """Most memory that it takes beyond what was taken before, in MB (2^20 bytes); None where that is not known."""
    if device.type != "cuda":
        run()
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return round((torch.cuda.max_memory_allocated(device) - before) / 2**20, 1)
