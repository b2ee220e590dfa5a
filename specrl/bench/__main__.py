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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from specrl.bench.pair import Bench, PairConfig, Timing, cut, device_name, prepare, useless, with_config
from specrl.config import load as cli
from specrl.results import tables
from specrl.results.records import counted
from specrl.results.speedup import Flips
from specrl.run.policy import rollout_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("case", "reused", "plain s", "specrl s", "speedup", "slowest")


def main(config: PairConfig) -> int:
    from rich.console import Console

    bench, _, tokenizer = prepare(config)
    cases = [
        bench.time_pairs("fresh noise", replay=0.0),
        bench.time_pairs("replayed noise", replay=1.0),
        bench.time_pairs("same policy, replayed", replay=1.0, old_policy="newer"),
        bench.time_pairs("texts cut at random", replay=0.0, change=cut),
        bench.time_pairs("useless drafts", replay=0.0, change=useless),
    ]
    console = Console()
    described = f"{config.rows} rows, {config.model}, {config.trainer.precision}, {config.rollout.engine}"
    title = f"{described}: medians (least to largest) of {counted(config.repeats, 'pair')}"
    tables.show(console, title, COLUMNS, [cells(case) for case in cases])
    differing = sum(case.differing_rows for case in cases)
    before = sum(case.differing_rows * case.flip_position for case in cases)
    flips = Flips(differing, sum(case.compared_tokens for case in cases), before / max(1, differing))
    tables.note(console, f"compared token for token: {flips.sentence(rollout_dtype(config))}")
    seconds = generate_seconds(bench, tokenizer) if config.rollout.engine == "transformers" else None
    if seconds:
        tables.note(
            console,
            f"plain decoding {seconds['plain']:.3f} s, model.generate {seconds['generate']:.3f} s for "
            f"{config.rollout.max_new_tokens} tokens a row: plain decoding, the baseline, is "
            f"{seconds['generate'] / seconds['plain']:.2f}x as fast as generate",
        )
    bench.engine.close()
    if config.out:
        result = {
            "options": asdict(config),
            "device": device_name(bench.model.device),
            "cases": [asdict(case) for case in cases],
            "generate_s": seconds,
        }
        Path(config.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def cells(timing: Timing) -> tuple[str, ...]:
    """A row of the table. `slowest` is the largest number of passes of a row, with specrl and with plain decoding."""
    low, high = timing.speedup_range
    return (
        timing.name,
        f"{timing.reused:.0%}",
        f"{timing.plain_s:.3f}",
        f"{timing.specrl_s:.3f}",
        f"{timing.speedup:.2f}x ({low:.2f} to {high:.2f})",
        f"{timing.passes_max}/{timing.plain_passes}",
    )


def generate_seconds(bench: Bench, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """Median seconds of model.generate and of the engine's plain decoding, timed alternately.

    Both ignore EOS and sample up to the length cap, so they take the same number of steps.
    """
    import torch

    from specrl.rollout.engines.base import SamplingParams
    from specrl.rollout.engines.local.engine import TransformersEngine
    from specrl.rollout.types import Request

    cap = bench.config.rollout.max_new_tokens
    temperature = bench.config.rollout.temperature
    engine = TransformersEngine(bench.model, SamplingParams(frozenset(), temperature))
    requests = [Request(row.prompt, i, cap) for i, row in enumerate(bench.rows)]
    inputs = tokenizer.pad({"input_ids": [list(row.prompt) for row in bench.rows]}, return_tensors="pt")
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    length = {"max_new_tokens": cap, "min_new_tokens": cap, "pad_token_id": tokenizer.pad_token_id}
    times: dict[str, list[float]] = {"plain": [], "generate": []}
    for _ in range(bench.config.repeats + 1):
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
    return cli.run(main, argv, PairConfig, training=False, words=with_config)


if __name__ == "__main__":
    raise SystemExit(command())
