"""Rollouts with drafts that are of no or little use, against plain decoding, on a quiet machine and under load.

    OMP_NUM_THREADS=1 GOMP_SPINCOUNT=20000 python -m benchmarks.research.never_slower config=NAME sizes=[8,32] out=FILE

For each number of rows and each text a new engine rolls out the same rows in turn by plain decoding and with drafts, as
`benchmarks.paired` does. The speedup is the ratio of the sums of all pairs, the first one included, in which the budget
knows nothing yet. With `busy=true` a process loops on every core that this one may use. Seconds are then those of the
CPU that the rollouts used: how much of a core they get differs more between two rollouts than drafts can.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.paired import Bench, Change, PairConfig, cut, device_name, prepare, useless, with_config
from specrl.config import load as cli
from specrl.results import tables
from specrl.rollout.build import build_engine
from specrl.rollout.sections import doc
from specrl.rollout.types import RolloutBatch
from specrl.run.machine import usable

COLUMNS = ("rows", "text", "speedup", "pairs", "reused", "tried")
TEXTS: dict[str, tuple[Change | None, float]] = {"useless": (useless, 0.0), "cut": (cut, 0.0), "drifted": (None, 1.0)}
"""What is done to the old text, and `rollout.replay`: drifted text comes from perturbed weights with the same noise."""


@dataclass
class NeverSlowerConfig(PairConfig):
    sizes: list[int] = field(default_factory=list, metadata={"help": "several numbers of rows, in the place of rows"})
    busy: bool = doc(False, "beside a process that loops on every core that this one may use")


@dataclass(frozen=True)
class Line:
    rows: int
    text: str
    speedup: float
    """Seconds of plain decoding over those with drafts, summed over all pairs."""
    pairs: list[float]
    """The same ratio of every pair."""
    reused: float
    tried: float
    """`spec/tried_s` over the seconds of the rollouts with drafts, by the clock on the wall."""

    def cells(self) -> tuple[str, ...]:
        pairs = f"{min(self.pairs):.2f} to {max(self.pairs):.2f}"
        return str(self.rows), self.text, f"{self.speedup:.3f}x", pairs, f"{self.reused:.0%}", f"{self.tried:.1%}"


def timed(work: Callable[[], RolloutBatch], busy: bool) -> tuple[float, RolloutBatch]:
    """Seconds of a rollout, or of its CPU, with what it returns."""
    clock = time.process_time if busy else time.perf_counter
    began = clock()
    batch = work()
    return clock() - began, batch


def measure(bench: Bench, config: NeverSlowerConfig, text: str) -> Line:
    """Times pairs of rollouts with a text, by an engine that has drafted nothing before."""
    change, replay = TEXTS[text]
    old = bench.old_batch()
    bench.engine = build_engine(bench.spec, bench.model)
    bench.switch("newer")
    bench.plain(2, replay)  # warms up
    pairs = []
    for i in range(config.repeats):
        plain = timed(lambda: bench.plain(1, replay), config.busy) if i % 2 else None
        drafted = timed(lambda: bench.timed(bench.rollout(old, replay=replay, change=change)), config.busy)
        pairs.append((plain or timed(lambda: bench.plain(1, replay), config.busy), drafted))
    plain_s, specrl_s = ([seconds for seconds, _ in side] for side in zip(*pairs, strict=True))
    batches = [batch for _, (_, batch) in pairs]
    done = [completion for batch in batches for completion in batch.completions]
    return Line(
        len(bench.rows),
        text,
        sum(plain_s) / sum(specrl_s),
        [plain / specrl for plain, specrl in zip(plain_s, specrl_s, strict=True)],
        reused=sum(sum(c.reused) for c in done) / sum(len(c.tokens) for c in done),
        tried=sum(batch.stats.tried_s for batch in batches) / sum(batch.total_s for batch in batches),
    )


@contextmanager
def load(busy: bool) -> Iterator[None]:
    """Processes that loop on every usable core, if wanted."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(usable() or 1) if busy]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main(config: NeverSlowerConfig) -> int:
    from rich.console import Console

    lines = []
    with load(config.busy):
        for rows in config.sizes or [config.rows]:
            bench, _ = prepare(replace(config, rows=rows))
            for text in TEXTS:
                lines.append(measure(bench, config, text))
                print(*lines[-1].cells(), flush=True)
    beside = "beside a busy loop on every core" if config.busy else "alone"
    title = f"{config.model}, temperature {config.rollout.temperature:g}, {beside}: {config.repeats} pairs each"
    tables.show(Console(), title, COLUMNS, [line.cells() for line in lines])
    if config.out:
        result = {"busy": config.busy, "device": device_name(bench.model.device), "lines": [asdict(x) for x in lines]}
        Path(config.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, with_config(sys.argv[1:]), NeverSlowerConfig, training=False))
