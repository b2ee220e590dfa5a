"""Rollouts with drafts that are of no or little use, against plain decoding at the same time.

    python -m benchmarks.research.never_slower config=NAME sizes=[8,32] out=FILE

For each number of rows and each text two engines roll out the same rows on a CPU, a pass each in turn. After each pair
they change sides. The speedup is the ratio of the CPU seconds of all rollouts, the first ones included, in which the
budget knows nothing of drafts. CPU seconds are of the thread that rolls out, so they are of all work with
OMP_NUM_THREADS=1 only; beside other work pairs of equal rollouts are 1 % apart by them, and 3 % by the clock.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks.interleaved import sharing
from benchmarks.paired import Bench, Change, PairConfig, cut, device_name, prepare, useless, with_config
from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.results import tables
from specrl.rollout.build import build_engine
from specrl.rollout.sections import doc
from specrl.rollout.types import RolloutBatch

COLUMNS = ("rows", "text", "speedup", "standard error", "by the clock", "reused", "tried")
TEXTS: dict[str, tuple[Change | None, float]] = {
    "useless": (useless, 0.0),
    "cut": (cut, 0.0),
    "drifted": (None, 1.0),
    "old": (None, 0.0),
}
"""What is done to the old text, which comes from perturbed weights, and `rollout.replay`: 1 keeps its noise."""


@dataclass
class NeverSlowerConfig(PairConfig):
    sizes: list[int] = field(default_factory=list, metadata={"help": "several numbers of rows, in the place of rows"})
    loops: int = doc(0, "busy loops on the same cores until the engines have made their first, plain rollouts")
    texts: list[str] = field(default_factory=lambda: [*TEXTS], metadata={"help": f"of {', '.join(TEXTS)}"})


@dataclass(frozen=True)
class Line:
    rows: int
    text: str
    speedup: float
    """CPU seconds of plain decoding over those with drafts, summed over all rollouts."""
    by_clock: float
    """The same of the seconds on the wall."""
    pairs: list[float]
    """Ratio of the CPU seconds of every pair."""
    reused: float
    tried: float
    """`spec/tried_s` over the seconds of the rollouts with drafts."""

    @property
    def error(self) -> float:
        """The standard error of the mean of the pairs."""
        mean = sum(self.pairs) / len(self.pairs)
        squares = sum((pair - mean) ** 2 for pair in self.pairs)
        return math.sqrt(squares / max(len(self.pairs) - 1, 1) / len(self.pairs))

    def cells(self) -> tuple[str, ...]:
        shares = f"{self.reused:.0%}", f"{self.tried:.1%}"
        return str(self.rows), self.text, f"{self.speedup:.3f}x", f"{self.error:.3f}", f"{self.by_clock:.3f}x", *shares


def measure(bench: Bench, text: str, loops: int = 0) -> Line:
    """Pairs of rollouts, by an engine that has drafted nothing before and by one that never drafts."""
    change, replay = TEXTS[text]
    old = bench.old_batch()
    with other_work(loops):
        engines = [build_engine(bench.spec, model) for model in (bench.model, sharing(bench.model))]
        bench.engine, bench.plain_engine = engines
        bench.switch("newer")
        for engine in engines:  # warms up
            bench.rollout(None, engine=engine, acceptance="off", replay=replay).generate(bench.rows, visit=2, step=1)
    pairs = []
    for i in range(bench.config.repeats):
        stage = bench.rollout(old, replay=replay, change=change)
        rollouts = [timed(bench.plain(1, replay)), timed(partial(bench.timed, stage))]
        order = 1 - 2 * (i % 2)
        pairs.append(bench.together(*rollouts[::order])[::order])
        swap(bench)
    plain_s, drafted_s = (sum(seconds for seconds, _ in side) for side in zip(*pairs, strict=True))
    plain, drafted = ([batch for _, batch in side] for side in zip(*pairs, strict=True))
    wall_s = sum(batch.total_s for batch in drafted)
    done = [completion for batch in drafted for completion in batch.completions]
    return Line(
        rows=len(bench.rows),
        text=text,
        speedup=plain_s / drafted_s,
        by_clock=sum(batch.total_s for batch in plain) / wall_s,
        pairs=[one / other for (one, _), (other, _) in pairs],
        reused=sum(sum(c.reused) for c in done) / sum(len(c.tokens) for c in done),
        tried=sum(batch.stats.tried_s for batch in drafted) / wall_s,
    )


@contextmanager
def other_work(loops: int) -> Iterator[None]:
    """Busy loops beside the block, which run where this process may."""
    with ExitStack() as stack:
        for _ in range(loops):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def timed(rollout: Callable[[], RolloutBatch]) -> Callable[[], tuple[float, RolloutBatch]]:
    """The rollout, with the CPU seconds of its thread."""

    def run() -> tuple[float, RolloutBatch]:
        began = time.thread_time()
        batch = rollout()
        return time.thread_time() - began, batch

    return run


def swap(bench: Bench) -> None:
    """The engines change sides, and the budget stays with the drafts: the memory of one may be a bit faster."""
    drafts, plain = bench.engine, bench.plain_engine
    drafts.drafting, plain.drafting = plain.drafting, drafts.drafting
    bench.engine, bench.plain_engine = plain, drafts


def main(config: NeverSlowerConfig) -> int:
    from rich.console import Console

    if unknown := [text for text in config.texts if text not in TEXTS]:
        raise ConfigError(f"texts=[{unknown[0]}]: no such text. Use {', '.join(TEXTS)}.")
    lines = []
    for rows in config.sizes or [config.rows]:
        bench, _ = prepare(replace(config, rows=rows))
        for text in config.texts:
            lines.append(measure(bench, text, config.loops))
            print(*lines[-1].cells(), flush=True)
    title = f"{config.model}, temperature {config.rollout.temperature:g}: {config.repeats} pairs each"
    tables.show(Console(), title, COLUMNS, [line.cells() for line in lines])
    if config.out:
        result = {"device": device_name(bench.model.device), "lines": [asdict(line) for line in lines]}
        Path(config.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, with_config(sys.argv[1:]), NeverSlowerConfig, training=False))
