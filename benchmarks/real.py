"""Both kinds of drafts on the real language model, by temperature: `python -m benchmarks.real [gpu=1.5B] [out=FILE]`.

Does what `specrl.bench` does at each temperature and number of rows; beside it, the published rule of SPEC-RL with the
same old text (`lenience`), and model.generate in the place of plain decoding. On a CPU the transformers engine makes a
pass of a plain rollout and one with drafts in turn. With `gpu` the seconds are simulated: the same passes under a clock
that only forward passes advance, by what they would take on an H100 with a model of that size, so that the budget
drafts as it would there. A pass of t tokens over rows with w positions each takes

    max((weights + KV) / 3.0 TB/s, 2 x parameters x t / 450 TFLOP/s) + 1.5 ms

in bfloat16, with the KV of Qwen2.5. A pass of a head reads its own layer and the output layer, and is launched in a
28th of the time. The clock leaves out sampling, other drafters and the rest of a step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.interleaved import interleaved, possible, sharing
from benchmarks.paired import generate_seconds, with_config
from specrl.bench import KINDS, Bench, BenchConfig, Reading, Result, Timing, prepare, show
from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.results.records import counted
from specrl.rollout.sections import doc
from specrl.run.policy import engine_spec, load_tokenizer

if TYPE_CHECKING:
    from rich.console import Console

    from specrl.rollout.types import RolloutBatch

BANDWIDTH, COMPUTE, LAUNCH_S, LAYERS = 3.0e12, 450e12, 1.5e-3, 28


@dataclass(frozen=True)
class Size:
    """What a model of Qwen2.5 reads: numbers of parameters, and bytes of KV at a position."""

    parameters: float
    head: float
    """A layer, the output layer, and the matrix of 2 H x H."""
    position_bytes: int


SIZES = {
    "1.5B": Size(1.54e9, 4.7e7 + 2.33e8 + 4.7e6, LAYERS * 2 * 256 * 2),
    "7B": Size(7.6e9, 2.33e8 + 5.45e8 + 2.57e7, LAYERS * 2 * 512 * 2),
}


@dataclass
class RealConfig(BenchConfig):
    temperatures: list[float] = field(default_factory=lambda: [0.3, 0.6, 1.0], metadata={"help": "to measure at"})
    sizes: list[int] = field(default_factory=list, metadata={"help": "several numbers of rows, in the place of rows"})
    lenience: list[float] = field(default_factory=lambda: [1.0, 1.65], metadata={"help": "of the published rule"})
    gpu: str = doc("", "simulate an H100 with a model of this size: 1.5B or 7B; empty measures seconds here")
    repeats: int = doc(2, "timed pairs of each kind of drafts, after one rollout that warms up", low=1)


class Clock:
    """Seconds that only passes take."""

    def __init__(self, size: Size):
        self.now = 0.0
        self.size = size

    def __call__(self) -> float:
        return self.now

    def charge(self, tokens: int, positions: int, head: bool = False) -> None:
        """Adds a pass. Args: positions: of all rows, whose KV is read; head: of a head, not of the policy."""
        parameters, layers = (self.size.head, 1) if head else (self.size.parameters, LAYERS)
        read_s = (2 * parameters + positions * self.size.position_bytes * layers / LAYERS) / BANDWIDTH
        self.now += max(read_s, 2 * parameters * tokens / COMPUTE) + LAUNCH_S * layers / LAYERS


def simulate(size: str) -> None:
    """From here on, time is that of a simulated GPU. Call it before the rollouts are imported."""
    if size not in SIZES:
        raise ConfigError(f"gpu={size} is none of {', '.join(SIZES)}.")
    time.perf_counter = clock = Clock(SIZES[size])
    from specrl.rollout.engines.local.head import Head
    from specrl.rollout.engines.local.model import PackedModel

    forward = PackedModel.forward

    def timed(self: Any, tokens: Any, layout: Any) -> Any:
        clock.charge(len(tokens), layout.count * layout.width, isinstance(self.model, Head))
        return forward(self, tokens, layout)

    PackedModel.forward = timed  # type: ignore[method-assign]


def line(config: RealConfig, console: Console) -> dict[str, Any]:
    """Both kinds of drafts, the published rule, and generate, at one temperature and number of rows."""
    bench, old, reading = prepare(config, console.print)
    timings = [timed(bench, kind, reading, old, console.print) for kind in KINDS]
    result = Result(reading, bench.price(old), timings)
    bench.engine.close()
    show(config, result, console)
    found = {"rows": config.rows, "temperature": config.rollout.temperature, **asdict(result)}
    found["advice"] = result.advice()
    if config.rollout.engine == "transformers" and not config.rollout.drafter:
        found["published"] = [published(bench, old, reading, factor, console) for factor in config.lenience]
    if config.rollout.engine == "transformers" and not config.gpu:
        found["generate_s"] = generate_seconds(bench, load_tokenizer(config))
    return found


def timed(bench: Bench, kind: str, reading: Reading, old: RolloutBatch, doing: Callable[[str], None]) -> Timing:
    """What `Bench.time` does, but a pass each in turn where seconds of the transformers engine on a CPU count."""
    config = bench.config
    if isinstance(time.perf_counter, Clock) or not possible(config.rollout.engine, bench.model):
        return bench.time(kind, reading, old, doing)
    from specrl.rollout.build import build_engine
    from specrl.rollout.speculative import SpeculativeRollout

    doing(f"{kind}: warming up")
    keys = bench.draft(kind, old).keys
    engine = build_engine(engine_spec(config, bench.sampling.eos_ids), sharing(bench.model))
    plain = partial(SpeculativeRollout(engine, None, config.rollout, config.seed).plain, bench.rows, keys)
    doing(f"{kind}: plain decoding and drafts, {counted(config.repeats, 'pair')}")
    drafts = partial(bench.draft, kind, old)
    pairs = [interleaved(plain, drafts) for _ in range(config.repeats)]
    engine.close()
    return Timing.of(kind, reading, pairs)


def published(bench: Bench, old: RolloutBatch, reading: Reading, lenience: float, console: Console) -> dict[str, Any]:
    """The same old text under SPEC-RL's rule, which accepts it with probability min(1, lenience * p_new / p_old)."""
    rollout = replace(bench.config.rollout, acceptance="lenient", lenience=lenience)
    other = Bench(replace(bench.config, rollout=rollout), bench.model, bench.sampling.eos_ids, bench.rows)
    timing = asdict(timed(other, next(iter(KINDS)), reading, old, console.print))
    del timing["p"]
    return timing | {"kind": "published rule", "lenience": lenience}


def main(config: RealConfig) -> int:
    if config.gpu:
        simulate(config.gpu)
    from rich.console import Console

    console = Console()
    lines = []
    for rows in config.sizes or [config.rows]:
        for temperature in config.temperatures:
            given = replace(config, rows=rows, rollout=replace(config.rollout, temperature=temperature))
            lines.append(line(given, console))
    if config.out:
        figures = {"gpu": config.gpu, "lines": lines}
        Path(config.out).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, with_config(sys.argv[1:], "grpo_smollm2"), RealConfig, training=False))
