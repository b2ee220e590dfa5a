"""The budget against every fixed draft length, on simulated machines whose passes cost a known time.

    python -m benchmarks.research.budget machine=cpu out=FILE

Runs `benchmarks.ablation` with real texts of the embedded policy under a clock that only forward passes advance: one
over n rows and t tokens that attend to w positions takes a + r n + (b + c w) t seconds. The budget fits costs,
estimates acceptance and chooses lengths as usual, so its choices are compared without noise. The clock leaves out
drafting, sampling, and the padding of rows of unequal length.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from specrl.config import load as cli
from specrl.rollout.sections import doc

MACHINES = {  # (a, r, b, c) in milliseconds
    "cpu": (6.4, 0.17, 0.012, 2e-4),  # the embedded policy on two cores, as the budget fits it there
    "gpu": (8.0, 0.02, 0.03, 0.0),  # about a 7B policy in bf16: its weights are read in 8 ms, a token computes 0.03 ms
}
DRAFTERS = {  # the same of a drafter of one layer, such as `python -m specrl.drafter kind=head` makes
    "cpu": (
        1.28,
        0.034,
        0.0024,
        4e-5,
    ),  # a fifth of the policy's of 8 layers, as measured: `PackedModel.timing` of both
    "gpu": (
        0.95,
        0.0,
        0.0035,
        0.0,
    ),  # one of 28 layers 0.25 ms, the output layer 0.62, a head's own matrix 0.03, launch
}
WINDOWS = (2, 4, 8, 16, 32, 64)
BUDGET = "+ prompt"
"""The method with all texts, whose lengths the budget chooses."""


@dataclass
class BudgetConfig:
    machine: str = doc("cpu", "whose costs: cpu or gpu")
    rows: list[int] = field(default_factory=lambda: [1, 8, 64], metadata={"help": "rows of a batch, for each table"})
    drafters: list[str] = field(default_factory=list, metadata={"help": "drafters of one layer to try: directories"})
    repeats: int = doc(2, "measured rollouts of each way of drafting")
    few: bool = doc(False, "all texts and the drafters only, without fewer sources and fixed lengths")
    out: str = doc("", "write the figures to this JSON file")


class Clock:
    """Seconds that only passes take."""

    def __init__(self, fixed: float, row: float, token: float, place: float):
        self.now, self._costs = 0.0, (fixed, row, token, place)

    def __call__(self) -> float:
        return self.now

    def charge(self, rows: int, tokens: int, width: int, costs: tuple[float, ...] = ()) -> None:
        fixed, row, token, place = costs or self._costs
        self.now += (fixed + row * rows + (token + place * width) * tokens) / 1e3


def main(options: BudgetConfig) -> int:
    if options.machine not in MACHINES:
        raise cli.ConfigError(f"machine={options.machine} is none of {', '.join(MACHINES)}.")
    clock = Clock(*MACHINES[options.machine])
    time.perf_counter = clock  # before rollout is imported, which keeps it as a default
    from benchmarks import ablation
    from benchmarks import paired as bench_pair
    from specrl.rollout.engines.local.model import Layout, PackedModel

    forward = PackedModel.forward

    def timed(self, tokens, layout: Layout):
        of_drafter = () if self.model is made.model else DRAFTERS[options.machine]
        clock.charge(layout.count, len(tokens), layout.width, of_drafter)
        return forward(self, tokens, layout)

    PackedModel.forward = timed
    most = -(-max(options.rows) // 8) * 8  # whole groups
    given = bench_pair.options(f"rows={most}", "rollout.max_new_tokens=220", "rollout.tokens_per_pass=4096")
    made, _ = bench_pair.prepare(given)
    ablation.SIZES, ablation.WINDOWS = options.rows, WINDOWS
    lines = [asdict(line) for line in ablation.measure(made, options.drafters, options.repeats, options.few)]
    costs = {"costs_ms": MACHINES[options.machine], "drafter_costs_ms": DRAFTERS[options.machine]}
    told = asdict(options) | {"drafters": [Path(drafter).name for drafter in options.drafters], "out": ""}
    result = {"options": told, **costs, "cells": list(cells(lines))}
    for cell in result["cells"]:
        print(f"{cell['rows']} rows, {cell['regime']}: {cell['budget / best']:.3f} of the best fixed length")
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def cells(lines: list[dict]) -> Iterator[dict]:
    """For each size and regime: all speedups, and the budget's over the best of plain decoding and fixed lengths."""
    for rows, regime in dict.fromkeys((line["rows"], line["regime"]) for line in lines):
        found = {line["method"]: line["speedup"] for line in lines if (line["rows"], line["regime"]) == (rows, regime)}
        best = max(found[name] for name in found if name == "plain" or name.startswith("window"))
        yield {"rows": rows, "regime": regime, "speedup": found, "budget / best": found[BUDGET] / best}


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=BudgetConfig))
