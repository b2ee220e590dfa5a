"""Share of rollout time that look-up and store take with a large cache.

    python benchmarks/research/cache_lookup.py [entries]

Fills a cache with trajectories of other prompts, then times rollouts of the embedded policy on it.
"""

from __future__ import annotations

import json
import random
import statistics
import sys

from specrl.rollout.build import build_engine
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import Row, Trajectory
from specrl.run.tasks import arithmetic
from specrl.tiny import load_tiny


def main(entries: int = 100_000, rows: int = 64) -> None:
    model, tokenizer = load_tiny()
    config = RolloutConfig(max_new_tokens=160)
    engine = build_engine(EngineSpec(rollout=config, eos_ids=frozenset([tokenizer.eos_token_id])), model)
    cache = TrajectoryCache(Fingerprint())
    rng = random.Random(0)
    for i in range(entries):
        tokens = tuple(rng.randrange(engine.vocab) for _ in range(100))
        cache.put(f"other-{i // 8}", i % 8, Trajectory(tokens, i, "length", 0, 0))
    problems = arithmetic("train", rows // 8, 0, "medium")
    batch_rows = [Row(p.id, tuple(tokenizer(p.prompt)["input_ids"])) for p in problems for _ in range(8)]
    rollout = SpeculativeRollout(engine, cache, config, seed=0)
    shares = []
    for visit in range(7):
        batch = rollout.generate(batch_rows, visit=visit, step=visit)
        rollout.store(batch_rows, batch, step=visit)
        shares.append((batch.lookup_s + batch.store_s) / batch.total_s)
    print(
        json.dumps(
            {
                "entries": len(cache),
                "rows": rows,
                "size_mb": round(cache.bytes / 2**20, 1),
                "bytes_per_token": round(cache.bytes / (entries * 100), 2),
                "share_median": round(statistics.median(shares[1:]), 5),
                "share_max": round(max(shares[1:]), 5),
            }
        )
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
