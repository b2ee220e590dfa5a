"""Texts and a head in one step of vLLM, against texts alone and a head alone: counts on Triton's interpreter.

    OMP_NUM_THREADS=1 TRITON_INTERPRET=1 python -m benchmarks.research.vllm_head drafter=HEAD out=FILE

Rolls out the rows of `benchmarks.ablation` in its regimes with Model Runner V2, where the interpreter runs it (see
tests/rollout/engines/vllm/test_vllm_v2.py). A rollout warms up each cell, others are counted. The budget sees the clock
of `benchmarks.research.budget`, the simulated GPU, which only passes of the policy and of the head advance. Every text
is compared with plain decoding by the same engine.
"""

from __future__ import annotations

import copy
import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.research.budget import DRAFTERS, MACHINES, Clock
from specrl.config import load as cli
from specrl.rollout.sections import SOURCES, doc

if TYPE_CHECKING:
    from benchmarks.paired import Bench
    from specrl.rollout.types import RolloutBatch

KINDS = {"texts": (False, SOURCES), "head": (True, ()), "head + texts": (True, SOURCES)}
"""Whether there is a head, and the texts."""
COUNTED = 8  # rows of a cell, at least: a smaller batch is rolled out several times
MACHINE = "gpu"


@dataclass
class VLLMHeadConfig:
    drafter: str = doc("", "the head, made by `python -m specrl.drafter kind=head`")
    rows: list[int] = doc([1, 8, 64], "rows of a batch")
    tokens: int = doc(48, "cap of a response")
    out: str = doc("", "write the counts to this JSON file")


def main(config: VLLMHeadConfig) -> int:
    from benchmarks import ablation
    from benchmarks import paired as pair

    most = -(-max(config.rows) // 8) * 8  # whole groups
    given = pair.options(f"rows={most}", f"rollout.max_new_tokens={config.tokens}", "rollout.tokens_per_pass=4096")
    made, _ = pair.prepare(given)
    old = {name: drift and ablation.old_texts(made, drift) for name, drift in ablation.REGIMES.items()}
    clock = Clock(*MACHINES[MACHINE])
    time.perf_counter = clock  # for the budgets of the engines from here on
    passes = count_passes(clock)
    lines = []
    for name, (head, sources) in KINDS.items():
        vllm = replace(made.config.rollout.vllm, runner="v2")
        terms = {"engine": "vllm", "drafter": config.drafter * head, "sources": list(sources), "vllm": vllm}
        theirs = replace(made.config, rollout=replace(made.config.rollout, **terms, kv_cache_mb=256))
        bench = pair.Bench(made.model, made.spec.eos_ids, theirs, made.rows, {}, made.weights["newer"])
        for line in cells(bench, config.rows, old, passes, clock):
            lines.append({"drafts": name, **line})
            print(json.dumps(lines[-1]), flush=True)
        bench.engine.close()
    if config.out:
        words = [f"rows={config.rows}".replace(" ", ""), f"tokens={config.tokens}", f"out={Path(config.out).name}"]
        command = " ".join(["python -m benchmarks.research.vllm_head drafter=HEAD", *words])
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        device = "Triton's interpreter on " + pair.device_name(made.model.device)
        about = {
            "command": command,
            "commit": commit,
            "device": device,
            "options": asdict(config) | {"drafter": "HEAD", "out": ""},
        }
        Path(config.out).write_text(json.dumps({**about, "cells": lines}, indent=1) + "\n", encoding="utf-8")
    return 0


def count_passes(clock: Clock) -> Counter[str]:
    """From now on counts the passes of policies and heads, and charges them to the clock."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from specrl.rollout.engines.vllm import planned_v2

    counts: Counter[str] = Counter()
    update, install = Scheduler.update_from_output, planned_v2.propose_with_model

    def update_from_output(self, scheduler_output, model_runner_output):
        tokens = scheduler_output.total_num_scheduled_tokens
        clock.charge(len(scheduler_output.num_scheduled_tokens), tokens, 0)
        counts["policy"] += tokens > 0
        return update(self, scheduler_output, model_runner_output)

    def of_head(module, arguments, terms) -> None:
        clock.charge(0, len(terms["input_ids"]), 0, DRAFTERS[MACHINE])
        counts["head"] += 1

    def propose_with_model(runner) -> None:
        install(runner)
        runner.speculator.model.register_forward_pre_hook(of_head, with_kwargs=True)

    Scheduler.update_from_output, planned_v2.propose_with_model = update_from_output, propose_with_model
    return counts


def cells(bench: Bench, sizes: Sequence[int], old: dict, passes: Counter[str], clock: Clock) -> Iterator[dict]:
    """The counts of each size and regime; one for all regimes where no text is read."""
    every, fresh = bench.rows, copy.deepcopy(bench.engine.drafting.budget)
    for size in sizes:
        bench.rows = every[:size]
        visits = range(2, 2 + max(1, COUNTED // size))
        plain = {visit: [c.tokens for c in bench.plain(visit).completions] for visit in visits}
        for regime, texts in old.items() if bench.config.rollout.sources else [("all", None)]:
            bench.engine.drafting.budget = copy.deepcopy(fresh)
            bench.timed(bench.rollout(texts and texts.select(range(size))))
            passes.clear()
            began, batches = clock.now, []
            for visit in visits:
                batches.append(bench.timed(bench.rollout(texts and texts.select(range(size))), visit))
                if [c.tokens for c in batches[-1].completions] != plain[visit]:
                    raise SystemExit(f"{size} rows, {regime}: other tokens than by plain decoding; counts mean nothing")
            yield {"rows": size, "regime": regime, **counted(batches, passes, clock.now - began)}


def counted(batches: Sequence[RolloutBatch], passes: Counter[str], seconds: float) -> dict:
    """What a batch did on average, and its rows."""
    done, n = [c for batch in batches for c in batch.completions], len(batches)
    stats = sum((batch.stats for batch in batches[1:]), batches[0].stats)
    return {
        "emitted": sum(len(c.tokens) for c in done) / n,
        "passes_a_row": sum(c.passes for c in done) / len(done),
        "passes_max": sum(max(c.passes for c in batch.completions) for batch in batches) / n,
        "computed": (sum(c.passes for c in done) + stats.drafted) / n,
        "passes": {name: count / n for name, count in passes.items()},
        "drafted_accepted": stats.sources,
        "simulated_ms": round(1e3 * seconds / n, 1),
    }


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=VLLMHeadConfig))
