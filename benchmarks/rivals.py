"""The same rows by vLLM as it comes, by vLLM's own speculation and by specrl's rules: one table, measured in turn.

python -m benchmarks.rivals config=grpo_math_vllm [rows=32] [repeats=5] [out=FILE]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp
from pathlib import Path
from typing import NamedTuple

from rollout.types import Request, RolloutError
from specrl.bench.pair import Bench, PairConfig, device_name, of_pairs, prepare, with_config
from specrl.config import load as cli
from specrl.results import tables

COLUMNS = ("method", "decoded", "steps", "speedup", "log-prob", "same")


class Result(NamedTuple):
    """One rollout of all rows."""

    seconds: float
    """Of the whole stage: look-up, drafting, verification, decoding and store."""
    tokens: int
    accepted: int
    """Tokens that a draft brought."""
    steps: int
    """Engine steps, the prefill's included."""
    logp: float
    """Mean log-prob of a token under the policy: methods that keep the law agree but for the noise of sampling."""
    identical: int | None = None
    """Rows equal to plain keyed decoding with the same keys; None where the noise is another."""


@dataclass(frozen=True)
class Line:
    """One method: the last rollout's counts, the median seconds, the median ratio to vLLM as it comes, and its range.

    Texts differ between methods in noise and therefore in length, so the ratio is of seconds per token.
    """

    method: str
    seconds: float | None = None
    tokens: int = 0
    decoded: int = 0
    steps: int = 0
    logp: float | None = None
    identical: int | None = None
    speedup: float | None = None
    speedup_range: tuple[float, float] | None = None
    note: str = ""


def main(config: PairConfig) -> int:
    if config.rollout.engine != "vllm":
        raise cli.ConfigError(f"rollout.engine={config.rollout.engine}: rivals are vLLM's. Add rollout.engine=vllm.")
    bench, *_ = prepare(config)
    lines = compare(bench, config.repeats)
    bench.engine.close()
    show(lines, config.rows)
    if config.out:
        result = {"options": asdict(config), "device": device_name(bench.model.device)}
        result["methods"] = [asdict(line) for line in lines]
        Path(config.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def compare(bench: Bench, repeats: int) -> list[Line]:
    """Every method that runs here, `repeats` times in turn after one warm-up."""
    from rollout.build import build_engine

    loose = replace(bench.config.rollout, law="lenient", lenience=exp(0.5))
    lenient = build_engine(replace(bench.spec, rollout=loose))
    bench.old_batch()
    for engine in (bench.engine, lenient):
        bench.switch("newer", engine)
    runs: dict[str, Callable[[], Result]] = {}
    missing, engines = [], [lenient]
    for name, method in {"vLLM": "", "vLLM + n-gram": "ngram", "vLLM + suffix": "suffix"}.items():
        try:
            engines.append(_plain_vllm(bench, method))
            runs[name] = _of_vllm(bench, engines[-1])
        except RolloutError as error:
            missing.append(Line(name, note=str(error).partition("\n")[0]))
    runs["specrl off"] = _of_specrl(bench, bench.engine, law="off")
    runs["specrl lenient e^0.5"] = _of_specrl(bench, lenient, law="lenient")
    runs["specrl exact, replay 0"] = _of_specrl(bench, bench.engine)
    runs["specrl exact, replay 1"] = _of_specrl(bench, bench.engine, replay=1.0)
    results: dict[str, list[Result]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, work in runs.items():
            results[name].append(work())
    for engine in engines:
        engine.close()
    return [_line(name, found[1:], results["vLLM"][1:]) for name, found in results.items()] + missing


def _plain_vllm(bench: Bench, method: str):
    from benchmarks.vllm_baseline import PlainVLLM
    from rollout.engines.base import Sampling

    law = bench.spec.rollout
    return PlainVLLM(bench.spec, Sampling(bench.spec.eos_ids, law.temperature, law.top_k, law.top_p), method)


def _of_vllm(bench: Bench, engine) -> Callable[[], Result]:
    cap = bench.config.rollout.max_new_tokens
    requests = [Request(row.prompt, i, cap) for i, row in enumerate(bench.rows)]

    def work() -> Result:
        engine.reset_cache()
        began = time.perf_counter()
        done = engine.generate(requests)
        spent, total = time.perf_counter() - began, sum(map(len, done.tokens))
        logp = sum(_log_prob(bench.model, row.prompt, text) for row, text in zip(bench.rows, done.tokens, strict=True))
        return Result(spent, total, done.accepted, done.steps, logp / total)

    return work


def _of_specrl(bench: Bench, engine, **settings) -> Callable[[], Result]:
    def work() -> Result:
        stage = bench.rollout(bench.old_batch(), engine=engine, **settings)
        engine.reset_cache()
        batch = bench.timed(stage)
        done, identical = batch.completions, None
        if stage.config.law != "lenient":
            plain = stage.plain(bench.rows, batch.keys).completions
            identical = sum(a.tokens == b.tokens for a, b in zip(done, plain, strict=True))
        accepted, total = sum(sum(c.reused) for c in done), sum(len(c.tokens) for c in done)
        logp = sum(sum(c.logprobs) for c in done) / total
        return Result(batch.total_s, total, accepted, batch.stats.passes, logp, identical)

    return work


def _log_prob(model, prompt: Sequence[int], text: Sequence[int]) -> float:
    """Log-prob of a response under the policy, at temperature 1."""
    import torch

    ids = torch.tensor([[*prompt, *text]], device=model.device)
    with torch.inference_mode():
        logp = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logp.gather(-1, ids[0, len(prompt) :, None]).sum().item()


def _line(name: str, found: Sequence[Result], plain: Sequence[Result]) -> Line:
    last = found[-1]
    ratio, *ends = of_pairs(*([r.seconds / r.tokens for r in side] for side in (found, plain)))
    seconds = statistics.median(r.seconds for r in found)
    decoded = last.tokens - last.accepted
    return Line(name, seconds, last.tokens, decoded, last.steps, last.logp, last.identical, ratio, tuple(ends))


def show(lines: Sequence[Line], rows: int) -> None:
    """The result as a table."""
    from rich.console import Console

    console, cells = Console(), []
    for line in lines:
        if line.seconds is not None:
            low, high = line.speedup_range
            speedup = f"{line.speedup:.2f}x ({low:.2f} to {high:.2f})"
            same = "" if line.identical is None else f"{line.identical}/{rows}"
            cells.append((line.method, f"{line.decoded}", f"{line.steps}", speedup, f"{line.logp:.3f}", same))
    tables.show(console, "vLLM, the same rows, measured in turn", COLUMNS, cells)
    tables.note(
        console,
        "speedup: seconds per token of vLLM as it comes over the method's, median (least to largest). log-prob: mean "
        "per token under the policy; far from vLLM's it is another law. same: rows equal to plain decoding with the "
        "same keys.",
    )
    for line in lines:
        if line.note:
            tables.note(console, f"{line.method} is missing: {line.note}")


if __name__ == "__main__":
    raise SystemExit(cli.run(main, with_config(sys.argv[1:]), PairConfig, training=False))
