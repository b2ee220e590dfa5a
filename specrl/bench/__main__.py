"""Paired rollout benchmark: `python -m specrl.bench [config=NAME] [model=PATH old_model=PATH] [rows=32]`.

An old policy fills the cache. A newer one then generates responses to the same prompts with the same keys, alternating
between plain and speculative decoding. Times cover the complete rollout: look-up, prefill, drafting, verification,
decoding and storing. Each pair gives one ratio; the median, the smallest and the largest are reported. The responses
are compared token for token.

The config (a name, a file or a run's directory) sets the model, prompts, engine and sampling. The default is grpo_math:
the embedded policy with generated arithmetic prompts.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Required, TypedDict

from specrl.bench.pair import Bench, Case, PairConfig, device_name, prepare, with_config
from specrl.config import load as cli
from specrl.results import tables
from specrl.results.records import counted
from specrl.results.speedup import Flips
from specrl.rollout.sections import doc
from specrl.run.policy import rollout_dtype


class Kind(TypedDict, total=False):
    """The arguments of `Bench.case` that differ between the cases."""

    replay: Required[float]
    drifted: bool
    useless: bool


CASES: dict[str, Kind] = {
    "fresh noise": {"replay": 0.0},
    "replayed noise": {"replay": 1.0},
    "same policy, replayed": {"replay": 1.0, "drifted": False},
    "useless drafts": {"replay": 0.0, "useless": True},
}
COLUMNS = ("case", "reused", "plain s", "specrl s", "speedup", "slowest")


@dataclass
class BenchConfig(PairConfig):
    generate: bool = doc(True, "also time transformers' model.generate on the same prompts")


def main(config: BenchConfig) -> int:
    from rich.console import Console

    bench, _, tokenizer = prepare(config)
    console, run = Console(), config.rollout
    cases = [bench.case(name, config.repeats, **kind) for name, kind in CASES.items()]
    what = f"{config.rows} rows, {config.model}, {config.trainer.precision}, {run.engine}"
    title = f"{what}: medians (least to largest) of {counted(config.repeats, 'pair')}"
    tables.show(console, title, COLUMNS, [cells(case) for case in cases])
    parted = sum(case.differing_rows for case in cases)
    before = sum(case.differing_rows * case.flip_position for case in cases)
    flips = Flips(parted, sum(case.compared_tokens for case in cases), before / max(1, parted))
    tables.note(console, f"compared token for token: {flips.told(rollout_dtype(config))}")
    result: dict[str, Any] = {"options": asdict(config), "device": device_name(bench.model.device)}
    result["cases"] = [asdict(case) for case in cases]
    if config.generate and run.engine == "transformers":
        seconds = result["generate_s"] = generate_seconds(bench, tokenizer, config.repeats)
        ratio = seconds["generate"] / seconds["plain"]
        tables.note(
            console,
            f"plain decoding {seconds['plain']:.3f} s, model.generate {seconds['generate']:.3f} s for "
            f"{run.max_new_tokens} tokens a row: the baseline is {ratio:.2f}x as fast as generate",
        )
    bench.engine.close()
    if config.out:
        Path(config.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def cells(c: Case) -> tuple[str, ...]:
    """A row of the table. `slowest` is the largest number of passes of a row, with specrl and with plain decoding."""
    speedup = f"{c.speedup:.2f}x ({c.speedup_range[0]:.2f} to {c.speedup_range[1]:.2f})"
    return (
        c.name,
        f"{c.reused:.0%}",
        f"{c.plain_s:.3f}",
        f"{c.specrl_s:.3f}",
        speedup,
        f"{c.passes_max}/{c.plain_passes}",
    )


def generate_seconds(bench: Bench, tokenizer, repeats: int) -> dict[str, float]:
    """Median seconds of model.generate and of the engine's plain decoding, timed alternately.

    Both ignore EOS and sample up to the length cap, so they take the same number of steps.
    """
    import torch

    from specrl.rollout.engines.base import SamplingParams
    from specrl.rollout.engines.local.engine import TransformersEngine
    from specrl.rollout.types import Request

    cap, temperature = bench.config.rollout.max_new_tokens, bench.config.rollout.temperature
    engine = TransformersEngine(bench.model, SamplingParams(frozenset(), temperature))
    requests = [Request(row.prompt, i, cap) for i, row in enumerate(bench.rows)]
    inputs = tokenizer.pad({"input_ids": [list(row.prompt) for row in bench.rows]}, return_tensors="pt")
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    length = {"max_new_tokens": cap, "min_new_tokens": cap, "pad_token_id": tokenizer.pad_token_id}
    times: dict[str, list[float]] = {"plain": [], "generate": []}
    for _ in range(repeats + 1):
        began = time.perf_counter()
        engine.generate(requests)
        times["plain"].append(time.perf_counter() - began)
        began = time.perf_counter()
        with torch.inference_mode():
            bench.model.generate(**inputs.to(bench.model.device), **sampling, **length)
        times["generate"].append(time.perf_counter() - began)
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def command(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return cli.run(main, argv, BenchConfig, training=False, words=with_config)


if __name__ == "__main__":
    raise SystemExit(command())
