"""What draft trees bring: `python -m benchmarks.trees [rows=32] [repeats=3] [token=0.0005] [out=FILE.json]`.

The same rows with the same keys in the regimes of the ablation, in turn: plain, and with up to 1, 2 and 4 branches.
Passes are counted. The budget is told that a token costs `token` of a pass, as on a device with compute to spare: it
then knows no clock, and the counts repeat exactly. `token=0` lets it measure this machine, for the ratios of seconds.
Every text is compared with plain decoding's.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.ablation import OTHERS, REGIMES
from rollout.engines import build_engine
from rollout.types import RolloutBatch
from specrl.pair import Bench, device_name, options, perturbed, prepare

WIDTHS = (1, 2, 4)


def main(rows: str = "32", repeats: str = "3", token: str = "0.0005", out: str = "") -> None:
    config = options(f"rows={rows}", "rollout.max_new_tokens=220", "rollout.tokens_per_pass=4096")
    bench, others, _ = prepare(config, OTHERS)
    seen = bench.rollout(None).generate(others, visit=0, step=0).completions
    learnt = [(row.prompt, c.tokens) for row, c in zip(others, seen, strict=True)]
    found = []
    for regime, drift in REGIMES.items():
        old = None
        if drift is not None:
            bench.weights["older"] = perturbed(bench.weights["newer"], drift)
            bench.switch("older")
            old = bench.rollout(None).generate(bench.rows, visit=0, step=0)
            bench.switch("newer")
        lines = compare(bench, old, learnt, int(repeats), float(token))
        show(f"{rows} rows, {regime}, token={token}", lines)
        found += [{"regime": regime, **line} for line in lines]
    if out:
        result = {"device": device_name(bench.model.device), "rows": int(rows), "token": float(token), "lines": found}
        Path(out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def compare(bench: Bench, old: RolloutBatch | None, learnt: list, repeats: int, token: float) -> list[dict]:
    """One line per width, 0 being plain decoding: means of counts, the median of the ratios of seconds to width 1."""
    config, engines = bench.config.rollout, {}
    for n in WIDTHS:
        spec = replace(bench.spec, rollout=replace(config, budget=replace(config.budget, branches=n)))
        engines[n] = build_engine(spec, bench.model)
    runs: dict[int, list[RolloutBatch]] = {0: [], **{n: [] for n in WIDTHS}}
    for visit in range(1, repeats + 2):
        for n, engine in engines.items():
            if token:
                engine.budget.cost = lambda rows=0: (1.0, token)
            engine.contexts.clear()
            engine.contexts.learn(learnt)
            stage = bench.rollout(old, engine=engine)
            runs[n].append(stage.generate(bench.rows, visit=visit, step=1))
            if n == 1:
                runs[0].append(stage.plain(bench.rows, runs[n][-1].keys))
            if [c.tokens for c in runs[n][-1].completions] != [c.tokens for c in runs[0][-1].completions]:
                raise SystemExit(f"{n} branches sampled other tokens than plain decoding; the table means nothing")
    return [line(n, batches[1:], runs[1][1:]) for n, batches in runs.items()]  # the first turn warms up


def line(branches: int, batches: list[RolloutBatch], single: list[RolloutBatch]) -> dict:
    """Means per row, the mean probability that branches cover, and how seconds compare with a single branch's."""
    done = [batch.completions for batch in batches]
    stats = [batch.stats for batch in batches]
    rows = len(done[0]) * len(done)
    return {
        "branches": branches,
        "passes": sum(c.passes for turn in done for c in turn) / rows,
        "slowest": statistics.mean(max(c.passes for c in turn) for turn in done),
        "drafted": sum(s.drafted for s in stats) / rows,
        "accepted": sum(s.accepted for s in stats) / rows,
        "forks": sum(s.forks for s in stats) / rows,
        "cover": sum(s.fork_mass for s in stats) / max(1, sum(s.forks for s in stats)),
        "ratio": statistics.median(a.total_s / b.total_s for a, b in zip(single, batches, strict=True)),
        "draft_s": sum(s.draft_s for s in stats) / sum(b.total_s for b in batches),
    }


def show(title: str, lines: list[dict]) -> None:
    table = Table(title=title)
    for column in lines[0]:
        table.add_column(column, justify="right")
    for one in lines:
        table.add_row(str(one["branches"] or "plain"), *(f"{value:.2f}" for value in list(one.values())[1:]))
    Console().print(table)


if __name__ == "__main__":
    main(**dict(word.split("=", 1) for word in sys.argv[1:]))
