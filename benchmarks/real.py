"""Both kinds of drafts on the real language model, by temperature: `python -m benchmarks.real [gpu=1.5B] [out=FILE]`.

Runs `specrl.bench` at each temperature. With `gpu` the seconds are simulated: the same passes under a clock that only
forward passes advance, by what they would take on an H100 with a model of that size, so that the budget drafts as it
would there. A pass of t tokens over rows with w positions each takes

    max((weights + KV) / 3.0 TB/s, 2 x parameters x t / 450 TFLOP/s) + 1.5 ms

in bfloat16, with the KV of Qwen2.5. The clock leaves out drafting, sampling and the rest of a step.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.paired import with_config
from specrl.bench import BenchConfig, measure, show
from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.rollout.sections import doc

SIZES = {"1.5B": (1.54e9, 28 * 2 * 256 * 2), "7B": (7.6e9, 28 * 2 * 512 * 2)}
"""Parameters, and bytes of KV at a position."""
BANDWIDTH, COMPUTE, LAUNCH_S = 3.0e12, 450e12, 1.5e-3


@dataclass
class RealConfig(BenchConfig):
    temperatures: list[float] = field(default_factory=lambda: [0.3, 0.6, 1.0], metadata={"help": "to measure at"})
    gpu: str = doc("", "simulate an H100 with a model of this size: 1.5B or 7B; empty measures seconds here")
    repeats: int = doc(2, "timed pairs of each kind of drafts, after one rollout that warms up", low=1)


class Clock:
    """Seconds that only passes take."""

    def __init__(self, size: str):
        self.now = 0.0
        self.parameters, self.position_bytes = SIZES[size]

    def __call__(self) -> float:
        return self.now

    def charge(self, tokens: int, positions: int) -> None:
        """Adds a pass. Args: positions: of all rows, whose KV is read."""
        read_s = (2 * self.parameters + positions * self.position_bytes) / BANDWIDTH
        self.now += max(read_s, 2 * self.parameters * tokens / COMPUTE) + LAUNCH_S


def simulate(size: str) -> None:
    """From here on, time is that of a simulated GPU. Call it before the rollouts are imported."""
    if size not in SIZES:
        raise ConfigError(f"gpu={size} is none of {', '.join(SIZES)}.")
    time.perf_counter = clock = Clock(size)
    from specrl.rollout.engines.local.model import PackedModel

    forward = PackedModel.forward

    def timed(self: Any, tokens: Any, layout: Any) -> Any:
        clock.charge(len(tokens), layout.count * layout.width)
        return forward(self, tokens, layout)

    PackedModel.forward = timed  # type: ignore[method-assign]


def main(config: RealConfig) -> int:
    if config.gpu:
        simulate(config.gpu)
    from rich.console import Console

    console = Console()
    lines = []
    for temperature in config.temperatures:
        given = replace(config, rollout=replace(config.rollout, temperature=temperature))
        result = measure(given, console)
        show(given, result, console)
        lines.append({"temperature": temperature} | asdict(result) | {"advice": result.advice()})
    if config.out:
        figures = {"gpu": config.gpu, "rows": config.rows, "lines": lines}
        Path(config.out).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, with_config(sys.argv[1:], "grpo_smollm2"), RealConfig, training=False))
