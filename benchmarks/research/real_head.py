"""A head on the real language model: `python -m benchmarks.research.real_head rollout.drafter=HEAD out=FILE`.

HEAD is made by `python -m specrl.drafter config=grpo_smollm2 kind=head out=HEAD`. At each temperature, over rollouts in
simulated seconds (benchmarks/real.py): acceptance by position of chains of CHAIN tokens, then passes and seconds with
old text one optimiser step old, with the head alone, and with both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.paired import with_config
from benchmarks.real import RealConfig, simulate
from specrl.bench import KINDS, Timing, prepare
from specrl.config import load as cli
from specrl.rollout.sections import doc

CHAIN = 4


@dataclass
class HeadConfig(RealConfig):
    gpu: str = doc("1.5B", "simulate an H100 with a model of this size: 1.5B or 7B")
    repeats: int = doc(1, "timed pairs, after one rollout that warms up", low=1)


def rollouts(config: HeadConfig, **settings: Any) -> Timing:
    """Pairs of rollouts with these settings of `rollout`, and old text under fresh noise."""
    bench, old, reading = prepare(replace(config, rollout=replace(config.rollout, **settings)), lambda doing: None)
    timing = bench.time(next(iter(KINDS)), reading, old, lambda doing: None)
    bench.engine.close()
    return timing


def by_position(chains: Sequence[tuple[int, int]]) -> list[float]:
    """Share of the tokens at each position of a chain that were accepted, of those whose predecessors were.

    Args: chains: drafted and accepted tokens of each.
    """
    shares = []
    for position in range(CHAIN):
        reached = [accepted for drafted, accepted in chains if drafted > position <= accepted]
        shares.append(sum(accepted > position for accepted in reached) / max(1, len(reached)))
    return shares


def line(config: HeadConfig) -> dict[str, Any]:
    """One temperature."""
    from specrl.rollout.drafting.drafting import Drafting

    chains: list[tuple[int, int]] = []
    learn = Drafting.learn

    def recorded(self: Any, row: Any, draft: Any, tokens: Any, drafted: int) -> None:
        if draft.source == "model":
            chains.append((len(draft.tokens), drafted))
        learn(self, row, draft, tokens, drafted)

    Drafting.learn = recorded  # type: ignore[method-assign]
    rollouts(config, sources=[], draft_tokens=CHAIN)
    Drafting.learn = learn  # type: ignore[method-assign]
    found = {
        "old text": rollouts(config, drafter=""),
        "head": rollouts(config, sources=[]),
        "old text and head": rollouts(config),
    }
    keys = ("passes", "plain_passes", "specrl_s", "plain_s", "speedup", "differing_rows")
    return {
        "temperature": config.rollout.temperature,
        "acceptance by position": by_position(chains),
        "chains": len(chains),
        **{name: {key: getattr(timing, key) for key in keys} for name, timing in found.items()},
    }


def main(config: HeadConfig) -> int:
    simulate(config.gpu)
    lines = []
    for temperature in config.temperatures:
        lines.append(line(replace(config, rollout=replace(config.rollout, temperature=temperature))))
        print(json.dumps(lines[-1]), flush=True)
    if config.out:
        result = {"gpu": config.gpu, "rows": config.rows, "lines": lines}
        Path(config.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, with_config(sys.argv[1:], "grpo_smollm2"), HeadConfig, training=False))
