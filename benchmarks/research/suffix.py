"""Share of a rollout that drafting from a prompt's texts takes.

    python benchmarks/research/suffix.py [rows] [tokens]

Rolls out the embedded policy to the cap, without an EOS: a first epoch, where rows draft only from each other, and a
later one, whose old texts are those of the first. Prints `EngineStats.draft_s` over the time of each rollout.
"""

from __future__ import annotations

import json
import sys
import time

from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.keys import derive_key
from specrl.rollout.types import Request
from specrl.run.tasks import arithmetic
from specrl.tiny import load_tiny

GROUP = 8


def main(rows: int = 64, tokens: int = 900) -> None:
    model, tokenizer = load_tiny()
    engine = TransformersEngine(model, SamplingParams(frozenset()))
    prompts = [tokenizer(p.prompt)["input_ids"] for p in arithmetic("train", rows // GROUP, 0, "medium")]
    old: list[list[int]] = [[] for _ in range(rows)]
    for visit, epoch in enumerate(("first epoch", "later epoch")):
        groups = [PromptTexts(old[i : i + GROUP] if visit else []) for i in range(0, rows, GROUP)]
        requests = [
            Request(
                prompts[i // GROUP],
                derive_key(0, "suffix", i, visit),
                tokens,
                SuffixDrafter(groups[i // GROUP], old[i] if visit else None),
            )
            for i in range(rows)
        ]
        began = time.perf_counter()
        done, stats = engine.generate(requests)
        seconds = time.perf_counter() - began
        old = [c.tokens for c in done]
        line = {
            "epoch": epoch,
            "rows": rows,
            "tokens": sum(map(len, old)),
            "passes": sum(c.passes for c in done) / rows,
            "sources": stats.sources,
            "seconds": round(seconds, 2),
            "draft_share": round(stats.draft_s / seconds, 4),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
