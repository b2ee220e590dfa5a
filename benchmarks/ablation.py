"""What each way of drafting adds: `python -m benchmarks.ablation [config=NAME] [rows=64] [drafters=[DIR]] [out=FILE]`.

The same rows with the same keys, by plain decoding and with one more source of drafts at a time, a pass each in turn,
in four regimes: a first epoch, in which no prompt has an old text, and later ones after much, some and little drift of
the weights. Every text is compared with plain decoding's.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.interleaved import sharing
from benchmarks.paired import Bench, PairConfig, device_name, of_pairs, perturbed, prepare, with_config
from specrl.config import load as cli
from specrl.results import tables
from specrl.rollout.sections import SOURCES, doc

if TYPE_CHECKING:
    from specrl.rollout.engines.local.engine import TransformersEngine
    from specrl.rollout.types import RolloutBatch

REGIMES = {"first epoch": None, "heavy drift": 0.1, "some drift": 0.05, "little drift": 0.02}
"""Noise on the old policy's matrices, in units of each matrix's spread; None for no old texts."""
SIZES = (1, 8, 64, 256)
WINDOWS = (4, 16, 64)  # fixed draft lengths that the budget is compared with
STEPS = {
    "prefix": ("prefix",),
    "+ position": ("prefix", "position"),
    "+ suffix": ("prefix", "position", "earlier", "group"),
    "+ prompt": SOURCES,
}
FEW = "all texts and the drafters only, without fewer sources and fixed lengths"


@dataclass
class AblationConfig(PairConfig):
    drafters: list[str] = field(default_factory=list, metadata={"help": "directories of draft models to try"})
    few: bool = doc(False, FEW)


@dataclass(frozen=True)
class Line:
    """One way of drafting in one regime; seconds are medians, the speedup the median of the ratios to plain.

    `speedup_range` is the least and the largest of these ratios.
    """

    regime: str
    rows: int
    method: str
    reused: float
    passes_per_row: float
    passes_max: int
    seconds: float
    tail_s: float
    """Mean seconds until a row of the slowest twentieth was finished."""
    speedup: float
    speedup_range: tuple[float, float]


@dataclass(frozen=True)
class Method:
    name: str
    engine: TransformersEngine
    sources: Sequence[str]


def main(config: AblationConfig) -> int:
    bench, _ = prepare(config)
    result = {"options": asdict(config), "device": device_name(bench.model.device)}
    result["lines"] = [asdict(line) for line in measure(bench, config.drafters, config.repeats, config.few)]
    bench.engine.close()
    if config.out:
        Path(config.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(bench: Bench, drafters: Sequence[str], repeats: int, few: bool = False) -> list[Line]:
    """Every method in every regime and size up to the bench's rows; prints a table for each size.

    Args:
        bench: policies, and the prompts of the largest size.
        drafters: directories of draft models to try.
        few: see FEW.
    """
    every, lines = bench.rows, []
    for size in (size for size in SIZES if size <= len(every)):
        bench.rows = every[:size]
        for regime, drift in REGIMES.items():
            old = None if drift is None else old_texts(bench, drift)
            batches = compare(bench, old, list(_methods(bench, drafters, few)), repeats)
            lines += [_line(regime, name, runs[1:], batches["plain"][1:]) for name, runs in batches.items()]
        show([line for line in lines if line.rows == size])
    bench.rows = every
    return lines


def _methods(bench: Bench, drafters: Sequence[str], few: bool) -> Iterator[Method]:
    """An engine for each way of drafting, all around the same model."""
    for name, sources in STEPS.items():
        if not few or sources is SOURCES:
            yield Method(name, _engine(bench, sources), sources)
    for drafter in drafters:
        yield Method(f"+ {Path(drafter).name}", _engine(bench, SOURCES, drafter=drafter), SOURCES)
    for window in () if few else WINDOWS:
        yield Method(f"window {window}", _engine(bench, SOURCES, window=window), SOURCES)


def _engine(bench: Bench, sources: Sequence[str], window: int = 0, drafter: str = "") -> TransformersEngine:
    from specrl.rollout.build import build_engine

    config = bench.config.rollout
    config = replace(config, sources=list(sources), drafter=drafter, draft_tokens=window)
    return build_engine(replace(bench.spec, rollout=config), sharing(bench.model))


def old_texts(bench: Bench, drift: float) -> RolloutBatch:
    """What the policy with noise on its weights wrote in the epoch before."""
    bench.weights["older"] = perturbed(bench.weights["newer"], drift)
    bench.switch("older")
    old = bench.rollout(None).generate(bench.rows, visit=0, step=0)
    bench.switch("newer")
    return old


def compare(
    bench: Bench, old: RolloutBatch | None, methods: Sequence[Method], repeats: int
) -> dict[str, list[RolloutBatch]]:
    """The rollouts of each method, and of plain decoding: one that warms up and `repeats` more."""
    batches: dict[str, list[RolloutBatch]] = {"plain": [], **{m.name: [] for m in methods}}
    for visit in range(1, repeats + 2):
        rollouts = {"plain": bench.plain(visit)}
        for method in methods:
            stage = bench.rollout(old, engine=method.engine, sources=list(method.sources))
            rollouts[method.name] = partial(bench.timed, stage, visit)
        names = [*rollouts]
        first = visit % len(names)
        order = names[first:] + names[:first]  # in turn: a pass takes a bit less after an equal one
        for name, batch in zip(order, bench.together(*(rollouts[name] for name in order)), strict=True):
            batches[name].append(batch)
        texts = {name: [c.tokens for c in runs[-1].completions] for name, runs in batches.items()}
        if wrong := [name for name, text in texts.items() if text != texts["plain"]]:
            raise SystemExit(f"{wrong[0]} sampled other tokens than plain decoding; the table means nothing")
    return batches


def _line(regime: str, method: str, runs: Sequence[RolloutBatch], plain: Sequence[RolloutBatch]) -> Line:
    done = runs[-1].completions
    ratio, *ends = of_pairs([batch.total_s for batch in runs], [batch.total_s for batch in plain])
    return Line(
        regime=regime,
        rows=len(done),
        method=method,
        reused=sum(sum(c.reused) for c in done) / sum(len(c.tokens) for c in done),
        passes_per_row=sum(c.passes for c in done) / len(done),
        passes_max=max(c.passes for c in done),
        seconds=statistics.median(batch.total_s for batch in runs),
        tail_s=statistics.median(_tail(batch) for batch in runs),
        speedup=ratio,
        speedup_range=tuple(ends),
    )


def _tail(batch: RolloutBatch) -> float:
    """Mean seconds of the slowest twentieth of the rows."""
    slowest = sorted((c.seconds for c in batch.completions), reverse=True)
    count = max(1, len(slowest) // 20)
    return sum(slowest[:count]) / count


def show(lines: Sequence[Line]) -> None:
    """Speedups by method and regime, of the rollout and of its slowest rows."""
    from rich.console import Console

    console, cells = Console(), {(line.method, line.regime): line for line in lines}
    regimes = list(dict.fromkeys(line.regime for line in lines))
    rows = []
    for method in dict.fromkeys(line.method for line in lines):
        pairs = [(cells[method, regime], cells["plain", regime]) for regime in regimes]
        rows.append((method, *(f"{line.speedup:.2f}x {plain.tail_s / line.tail_s:.2f}x" for line, plain in pairs)))
    title = f"{lines[0].rows} rows: speedup over plain decoding, and of the slowest twentieth of the rows"
    tables.show(console, title, ("drafts from", *regimes), rows)
    off = max(abs(end / line.speedup - 1) for line in lines for end in line.speedup_range)
    tables.note(console, f"Medians; no repeat's speedup is further than {off:.0%} from its median.")


if __name__ == "__main__":
    raise SystemExit(cli.run(main, with_config(sys.argv[1:]), AblationConfig, training=False))
