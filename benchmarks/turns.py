"""What drafts save in each turn of conversations with a tool, under TRL: `python -m benchmarks.turns [mode=colocate]`.

Trains the embedded tool policy by `reusing(GRPOTrainer)` without drafts and with them, and compares tokens and weights.
Then it trains with a tool that takes some time, with its results kept and without.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset

from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.results import tables
from specrl.rollout.config import RolloutConfig
from specrl.rollout.sections import doc
from specrl.run.machine import machine
from specrl.run.tasks import arithmetic
from specrl.run.tools import calculate
from specrl.tiny import TOOLS_PATH, load_tiny_tools
from specrl.trainers.scored import Scored


@dataclass
class TurnsConfig:
    mode: Literal["transformers", "colocate"] = doc("transformers", "how TRL generates")
    epochs: int = doc(3, "visits to each prompt", low=1)
    prompts: int = doc(8, "prompts, with 8 conversations each in a batch of their own", low=1)
    tool_ms: list[int] = doc([0, 10, 100], "times that the tool takes, in milliseconds")
    out: str = doc("", "file for the result as JSON")


@dataclass
class Run:
    """What one training run generated, and what it took."""

    batches: list[list[Scored]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    tool_s: float = 0.0
    """Seconds in which the trainer waited for the tool."""
    calls: int = 0
    """Of the tool, those that ran."""

    @property
    def tokens(self) -> list[list[int]]:
        return [c.tokens for turns in self.batches for turn in turns for c in turn.batch.completions]


def solved(completions: list[list[dict]], answer: list[str], **_: Any) -> list[float]:
    """1 for a conversation that ends with the answer."""
    pairs = zip(completions, answer, strict=True)
    return [float(messages[-1]["content"] == f"#### {right}") for messages, right in pairs]


def main(config: TurnsConfig) -> int:
    off, exact = (train(config, acceptance) for acceptance in ("off", "exact"))
    if off.tokens != exact.tokens or any(not torch.equal(off.weights[n], w) for n, w in exact.weights.items()):
        raise ConfigError("the runs with drafts and without differ in tokens or weights, so they are not comparable.")
    rows = by_turn(config, off, exact)
    tools = [tool_row(config, ms) for ms in config.tool_ms]
    result = {"mode": config.mode, "turns": rows, "tools": tools, "machine": machine()}
    print("\n".join(tables.markdown(tuple(rows[0]), [tuple(map(str, row.values())) for row in rows])))
    print()
    print("\n".join(tables.markdown(tuple(tools[0]), [tuple(map(str, row.values())) for row in tools])))
    if config.out:
        Path(config.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def train(config: TurnsConfig, acceptance: str, *, tool_ms: int = 0, deterministic: bool = False) -> Run:
    """One run of all epochs. Args: deterministic: the tool is declared so, and its results are kept."""
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from specrl import reusing

    run = Run()

    def tool(expression: str) -> int:
        began = time.perf_counter()
        time.sleep(tool_ms / 1000)
        run.calls += 1
        try:
            return calculate(expression)
        finally:
            run.tool_s += time.perf_counter() - began

    tool.__name__, tool.__doc__ = calculate.__name__, calculate.__doc__
    tool.deterministic = deterministic  # type: ignore[attr-defined]  # read by reusing()
    _, tokenizer = load_tiny_tools()
    problems = arithmetic("train", config.prompts, level="large")
    data = [{"prompt": [{"role": "user", "content": p.prompt}], "answer": p.answer} for p in problems]
    vllm: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 900}
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            folder,
            num_generations=8,
            per_device_train_batch_size=8,
            num_train_epochs=config.epochs,
            shuffle_dataset=False,
            max_completion_length=320,
            learning_rate=1e-4,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
            **(vllm if config.mode == "colocate" else {}),
        )
        trainer: Any = reusing(GRPOTrainer, RolloutConfig(acceptance=acceptance, measure_every=0))(  # type: ignore[arg-type]
            str(TOOLS_PATH),
            reward_funcs=solved,
            args=args,
            train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
            tools=[tool],
        )
        trainer.remove_callback(PrinterCallback)
        end = trainer.specrl.end

        def record() -> None:
            run.batches.append(list(trainer.specrl.turns))
            end()

        trainer.specrl.end = record
        began = time.perf_counter()
        trainer.train()
        run.seconds = time.perf_counter() - began
        run.weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    return run


def by_turn(config: TurnsConfig, off: Run, exact: Run) -> list[dict[str, Any]]:
    """Passes and seconds by turn and visit, without drafts and with them."""
    pairs: dict[tuple[int, int], list[tuple[Scored, Scored]]] = defaultdict(list)
    for number, (plain, drafted) in enumerate(zip(off.batches, exact.batches, strict=True)):
        for i, pair in enumerate(zip(plain, drafted, strict=True)):
            pairs[i, number // config.prompts].append(pair)
    rows = []
    for (turn, visit), both in sorted(pairs.items()):
        tokens = sum(plain.tokens for plain, _ in both)
        row: dict[str, Any] = {"turn": turn + 1, "visit": visit + 1, "rows": sum(len(p.rows) for p, _ in both)}
        row["tokens"] = tokens
        row["reused"] = round(sum(d.batch.stats.accepted for _, d in both) / max(1, tokens), 2)
        for name, side in (("plain", 0), ("drafted", 1)):
            row[f"passes {name}"] = sum(pair[side].batch.stats.passes for pair in both)
            row[f"seconds {name}"] = round(sum(pair[side].batch.total_s for pair in both), 2)
        rows.append(row)
    return rows


def tool_row(config: TurnsConfig, ms: int) -> dict[str, Any]:
    """Seconds of tool calls with every call made, and with results kept."""
    row: dict[str, Any] = {"tool ms": ms}
    for name, deterministic in (("every call", False), ("results kept", True)):
        run = train(config, "exact", tool_ms=ms, deterministic=deterministic)
        row |= {f"calls, {name}": run.calls, f"tool s, {name}": round(run.tool_s, 2)}
        row[f"run s, {name}"] = round(run.seconds, 1)
    return row


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=TurnsConfig))
