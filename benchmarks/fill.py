"""What rows of the next batch in the passes of this one save: `python -m benchmarks.fill out=FILE [key=value ...]`.

Runs of one config, plain and with each `rollout.fill`, on a simulated H100 (benchmarks/real.py has the clock: only
passes take time). All runs must end with the same bytes. Seconds, tokens and rows are by epoch, without the first
rollout, before which nothing can be ahead.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.ahead import rounded
from benchmarks.real import simulate
from benchmarks.twins import digest, train
from specrl.config import load as cli
from specrl.config import options
from specrl.config.schema import Config
from specrl.results import tables
from specrl.results.records import epoch, load_run, mean, total
from specrl.results.savings import rollouts
from specrl.rollout.sections import doc
from specrl.rollout.types import RolloutError
from specrl.run.machine import machine

SETTINGS = {
    "config": "grpo_math",
    "trainer.learning_rate": "2e-5",
    "trainer.lr_schedule": "constant",
    "rollout.measure_every": "0",
    "trainer.eval_prompts": "0",
    "report.plots": "false",
}
"""Options of all runs, unless the command line has others."""
PLAIN = "plain"
COLUMNS = ("epoch", "fill", "ms a rollout", "speed", "passes of the slowest row", "ahead", "complete", "unchanged")


@dataclass
class FillConfig(Config):
    fills: list[int] = field(default_factory=lambda: [0, 64, 150], metadata={"help": "values of rollout.fill"})
    gpu: str = doc("1.5B", "simulate an H100 with a model of this size: 1.5B or 7B")
    out: str = doc("", "write the figures to this JSON file too")


@dataclass(frozen=True)
class Line:
    """An epoch of a run; means over its rollouts."""

    epoch: int
    fill: str
    seconds: float
    """Simulated, of a rollout."""
    passes: float
    """Of the slowest row."""
    ahead: float
    """Tokens that rows of the next batch decoded, over those of the batch."""
    complete: float
    """Share of rows that had ended before their rollout."""
    unchanged: float
    """Share of rows that had ended and came out unchanged."""

    def cells(self, plain: Line) -> tuple[str, ...]:
        shares = (f"{share:.0%}" for share in (self.complete, self.unchanged))
        speed = f"{plain.seconds / self.seconds:.2f}x"
        numbers = (f"{1e3 * self.seconds:.0f}", speed, f"{self.passes:.0f}", f"{self.ahead:.2f}")
        return str(self.epoch), self.fill, *numbers, *shares


def by_epoch(run: Path, fill: str) -> list[Line]:
    steps = rollouts(load_run(run).steps)[1:]
    lines = []
    for n in range(1, round(epoch(steps[-1])) + 1):
        part = [record for record in steps if n - 1 + 1e-6 < epoch(record) <= n + 1e-6]
        names = ("timing_s/gen", "spec/passes_max", "spec/ahead_done_ratio", "spec/ahead_unchanged_ratio")
        seconds, passes, complete, unchanged = (mean(part, name) or 0.0 for name in names)
        tokens = total(part, "spec/reused_tokens") + total(part, "spec/new_tokens")
        ahead = total(part, "spec/ahead_tokens") / tokens
        lines.append(Line(n, fill, seconds, passes, ahead, complete, unchanged))
    return lines


def main(config: FillConfig, words: Sequence[str]) -> int:
    simulate(config.gpu)
    from rich.console import Console

    given = {key: value for key, value in options.parse(words).items() if key not in ("fills", "gpu", "out")}
    with tempfile.TemporaryDirectory(prefix="specrl-fill-") as name:
        runs = {PLAIN: train(Path(name), given, PLAIN, {"rollout.acceptance": "off"})}
        for fill in map(str, config.fills):
            runs[fill] = train(Path(name), given, f"fill-{fill}", {"rollout.fill": fill})
        digests = {fill: digest(run) for fill, run in runs.items()}
        if len({*digests.values()}) > 1:
            raise RolloutError(f"rollout.fill decides the weights: {digests}")
        lines = [line for fill, run in runs.items() for line in by_epoch(run, fill)]
    plain = {line.epoch: line for line in lines if line.fill == PLAIN}
    lines.sort(key=lambda line: line.epoch)
    cells = [line.cells(plain[line.epoch]) for line in lines]
    tables.show(Console(width=120), f"Simulated H100, {config.gpu} parameters", COLUMNS, cells)
    if config.out:
        result = {"gpu": config.gpu, "lines": [vars(line) for line in lines], "weights": digests[PLAIN]}
        result |= {"words": [word for word in words if not word.startswith("out=")], "machine": machine()}
        Path(config.out).write_text(json.dumps(rounded(result), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    keys = {word.partition("=")[0] for word in sys.argv[1:]}
    words = [*(f"{key}={value}" for key, value in SETTINGS.items() if key not in keys), *sys.argv[1:]]
    raise SystemExit(cli.run(partial(main, words=words), words, FillConfig))
