"""The same rows by stock vLLM, by vLLM's own speculation and by specrl's rules: one table, measured in turn.

python -m benchmarks.rivals config=grpo_math_vllm [rows=32] [repeats=5] [out=FILE]

Every engine runs in a process of its own (benchmarks/process.py), none in this one.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.paired import Bench, PairConfig, device_name, of_pairs, prepare, with_config
from benchmarks.process import Process
from benchmarks.vllm_baseline import METHODS, asked, settings
from specrl.config import load as cli
from specrl.config.options import to_yaml
from specrl.results import tables
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.types import Request, RolloutError

COLUMNS = ("method", "decoded", "steps", "speedup", "log-prob", "same")


class Result(NamedTuple):
    """One rollout of all rows."""

    seconds: float
    """Seconds of look-up, drafting, verification, decoding and store."""
    tokens: int
    accepted: int
    """Tokens that came from drafts."""
    steps: int
    """Engine steps, the prefill's included."""
    logp: float
    """Mean log-prob of a token under the policy: exact methods agree up to the noise of sampling."""
    identical: int | None = None
    """Rows equal to plain keyed decoding with the same keys; None where the noise differs."""


@dataclass(frozen=True)
class Line:
    """One method: the last rollout's counts, the median seconds, the median ratio to stock vLLM, and its range.

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
    show(lines, config.rows)
    if config.out:
        result = {"options": asdict(config), "device": device_name(bench.model.device)}
        result["methods"] = [asdict(line) for line in lines]
        Path(config.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def compare(bench: Bench, repeats: int) -> list[Line]:
    """Every method that runs here, `repeats` times in turn after one warm-up."""
    runs: dict[str, Callable[[], Result]] = {}
    missing: list[Line] = []
    with ExitStack() as open_, TemporaryDirectory() as folder:

        def started(module: str, **opening) -> Process:
            process = Process(f"benchmarks.{module}", **opening)
            open_.callback(process.close)
            return process

        on_gpu = bench.model.device.type == "cuda"
        for method, name in METHODS.items():
            try:
                process = started("vllm_baseline", settings=settings(bench.spec, on_gpu, method))
                runs[name] = _of_vllm(bench, process)
            except RolloutError as error:
                if not method:
                    raise
                missing.append(Line(name, note=f"vLLM cannot speculate by {method} here: {error}".partition("\n")[0]))
        saved = Path(folder, "config.yaml")
        saved.write_text(to_yaml(bench.config), encoding="utf-8")
        exact, lenient = (
            started("rival_engine", config=str(saved), **rule)
            for rule in ({"acceptance": "exact"}, {"acceptance": "lenient", "lenience": exp(0.5)})
        )
        runs["specrl off"] = _of_specrl(exact, acceptance="off")
        runs["specrl lenient e^0.5"] = _of_specrl(lenient, acceptance="lenient")
        runs["specrl exact, replay 0"] = _of_specrl(exact)
        runs["specrl exact, replay 1"] = _of_specrl(exact, replay=1.0)
        results: dict[str, list[Result]] = {name: [] for name in runs}
        for _ in range(repeats + 1):
            for name, work in runs.items():
                results[name].append(work())
    return [_line(name, runs_of_method[1:], results["vLLM"][1:]) for name, runs_of_method in results.items()] + missing


def _of_vllm(bench: Bench, process: Process) -> Callable[[], Result]:
    rollout, cap = bench.spec.rollout, bench.config.rollout.max_new_tokens
    requests = [Request(row.prompt, i, cap) for i, row in enumerate(bench.rows)]
    message = asked(requests, SamplingParams(bench.spec.eos_ids, rollout.temperature, rollout.top_k, rollout.top_p))

    def work() -> Result:
        done = process.ask(**message)
        texts, total = done["tokens"], sum(map(len, done["tokens"]))
        logp = sum(_log_prob(bench.model, row.prompt, text) for row, text in zip(bench.rows, texts, strict=True))
        return Result(done["seconds"], total, done["accepted"], done["steps"], logp / total)

    return work


def _of_specrl(process: Process, **options) -> Callable[[], Result]:
    return lambda: Result(**process.ask(**options))


def _log_prob(model, prompt: Sequence[int], text: Sequence[int]) -> float:
    """Log-prob of a response under the policy, at temperature 1."""
    import torch

    ids = torch.tensor([[*prompt, *text]], device=model.device)
    with torch.inference_mode():
        logp = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logp.gather(-1, ids[0, len(prompt) :, None]).sum().item()


def _line(name: str, runs_of_method: Sequence[Result], plain: Sequence[Result]) -> Line:
    last = runs_of_method[-1]
    ratio, *ends = of_pairs(*([r.seconds / r.tokens for r in side] for side in (runs_of_method, plain)))
    seconds = statistics.median(r.seconds for r in runs_of_method)
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
        "speedup: seconds per token of stock vLLM over the method's, median (least to largest). log-prob: mean "
        "per token under the policy; if it is far from vLLM's, the method is not exact. same: rows equal to plain "
        "decoding with the same keys.",
    )
    for line in lines:
        if line.note:
            tables.note(console, f"{line.method} is missing: {line.note}")


if __name__ == "__main__":
    raise SystemExit(cli.run(main, with_config(sys.argv[1:]), PairConfig, training=False))
