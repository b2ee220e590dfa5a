"""Rollouts with drafts that are of no or little use, against plain decoding at the same time on the same cores.

    OMP_NUM_THREADS=1 GOMP_SPINCOUNT=20000 taskset -c 0 python -m benchmarks.research.never_slower config=NAME \
        sizes=[8,32] out=FILE

For each number of rows and each text two processes with an engine each roll out the same rows. While one decodes
plainly the other drafts, then they change sides. They begin every rollout together and share the cores, so each is the
other's load, and whatever slows the machine slows both. Seconds are those of the CPU that a process used. The speedup
is the ratio of the sums of all rollouts, the first ones included, in which the budget knows nothing yet.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.paired import Bench, Change, PairConfig, cut, device_name, prepare, useless, with_config
from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.results import tables
from specrl.rollout.build import build_engine
from specrl.rollout.types import RolloutBatch

COLUMNS = ("rows", "text", "speedup", "standard error", "reused", "tried")
TEXTS: dict[str, tuple[Change | None, float]] = {
    "useless": (useless, 0.0),
    "cut": (cut, 0.0),
    "drifted": (None, 1.0),
    "old": (None, 0.0),
}
"""What is done to the old text, which comes from perturbed weights, and `rollout.replay`: 1 keeps its noise."""
LONGEST_WAIT_S = 3600
"""For the other process to begin its rollout."""


@dataclass
class NeverSlowerConfig(PairConfig):
    sizes: list[int] = field(default_factory=list, metadata={"help": "several numbers of rows, in the place of rows"})
    texts: list[str] = field(default_factory=lambda: [*TEXTS], metadata={"help": f"of {', '.join(TEXTS)}"})


@dataclass(frozen=True)
class Line:
    rows: int
    text: str
    speedup: float
    """CPU seconds of plain decoding over those with drafts, summed over all rollouts."""
    pairs: list[float]
    """The same ratio of every round, which has two rollouts of either kind."""
    reused: float
    tried: float
    """`spec/tried_s` over the seconds of the rollouts with drafts, by the clock on the wall."""

    @property
    def error(self) -> float:
        """The standard error of the mean of the pairs."""
        mean = sum(self.pairs) / len(self.pairs)
        squares = sum((pair - mean) ** 2 for pair in self.pairs)
        return math.sqrt(squares / max(len(self.pairs) - 1, 1) / len(self.pairs))

    def cells(self) -> tuple[str, ...]:
        shares = f"{self.reused:.0%}", f"{self.tried:.1%}"
        return str(self.rows), self.text, f"{self.speedup:.3f}x", f"{self.error:.3f}", *shares


def measure(bench: Bench, config: NeverSlowerConfig, text: str, drafts_first: bool, together: Any) -> dict[str, Any]:
    """CPU seconds of this process's rollouts, by an engine that has drafted nothing before.

    In every round it decodes plainly once and drafts once, while the other process does the opposite.
    """
    change, replay = TEXTS[text]
    old = bench.old_batch()
    bench.engine = build_engine(bench.spec, bench.model)
    bench.switch("newer")
    bench.plain(2, replay)  # warms up
    seconds: dict[bool, list[float]] = {False: [], True: []}
    batches: list[RolloutBatch] = []
    for drafts in [drafts_first, not drafts_first] * config.repeats:
        stage = bench.rollout(old, replay=replay, change=change)
        together.wait(LONGEST_WAIT_S)
        began = time.process_time()
        batch = bench.timed(stage) if drafts else bench.plain(1, replay)
        seconds[drafts].append(time.process_time() - began)
        batches += [batch] * drafts
    done = [completion for batch in batches for completion in batch.completions]
    return {
        "plain": seconds[False],
        "drafted": seconds[True],
        "reused": sum(sum(c.reused) for c in done) / sum(len(c.tokens) for c in done),
        "tried": sum(batch.stats.tried_s for batch in batches) / sum(batch.total_s for batch in batches),
        "device": device_name(bench.model.device),
    }


def side(drafts_first: bool, config: NeverSlowerConfig, together: Any, results: Any) -> None:
    """One of the two processes: sends what it measured, text by text."""
    for rows in config.sizes or [config.rows]:
        bench, _ = prepare(replace(config, rows=rows))
        for text in config.texts:
            results.send(measure(bench, config, text, drafts_first, together))


def received(receivers: Sequence[Connection]) -> list[dict[str, Any]]:
    """What each process sent."""
    messages: dict[Connection, dict[str, Any]] = {}
    while waiting := [receiver for receiver in receivers if receiver not in messages]:
        for receiver in wait(waiting):
            try:
                messages[receiver] = receiver.recv()
            except EOFError:
                raise RuntimeError("one of the two processes has ended; what it printed says why") from None
    return [messages[receiver] for receiver in receivers]


def main(config: NeverSlowerConfig) -> int:
    from rich.console import Console

    if unknown := [text for text in config.texts if text not in TEXTS]:
        raise ConfigError(f"texts=[{unknown[0]}]: no such text. Use {', '.join(TEXTS)}.")
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(2)
    sides = []
    results = []
    for drafts_first in (False, True):
        receiver, sender = context.Pipe(duplex=False)
        sides.append(context.Process(target=side, args=(drafts_first, config, together, sender), daemon=True))
        sides[-1].start()
        sender.close()  # so that `recv` ends with the process
        results.append(receiver)
    lines = []
    for rows in config.sizes or [config.rows]:
        for text in config.texts:
            one, other = received(results)
            rounds = [list(map(sum, zip(one[name], other[name], strict=True))) for name in ("plain", "drafted")]
            pairs = [plain / drafted for plain, drafted in zip(*rounds, strict=True)]
            shares = ((one[name] + other[name]) / 2 for name in ("reused", "tried"))
            lines.append(Line(rows, text, sum(rounds[0]) / sum(rounds[1]), pairs, *shares))
            print(*lines[-1].cells(), flush=True)
    for process in sides:
        process.join()
    title = f"{config.model}, temperature {config.rollout.temperature:g}: {config.repeats} rounds each"
    tables.show(Console(), title, COLUMNS, [line.cells() for line in lines])
    if config.out:
        result = {"device": one["device"], "lines": [asdict(line) for line in lines]}
        Path(config.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, with_config(sys.argv[1:]), NeverSlowerConfig, training=False))
