"""A script of TRL with drafts and without, for one combination of docs/trl.md; an error if they differ.

    python -m tests.trainers.grpo.matrix OUT MODE KIND,KIND,... [URL]

MODE: transformers, colocate or server (of `python -m specrl.serve` at URL). KIND: single, smollm2, rloo, tools, async
or environment. The colocated engine computes in float32, so that its log-probs can be compared with the trainer's; with
rloo in bfloat16, as TRL starts it.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specrl.rollout.config import RolloutConfig
from specrl.run.smollm2 import directory
from specrl.tiny import load
from tests.trainers.grpo.scripts import Run, make, make_conversations, train

TURNS = {"single": 1, "smollm2": 1, "rloo": 1, "tools": 3, "async": 3, "environment": 3}
"""Turns of the longest conversation of a script."""


def main(out: str, mode: str, kinds: str, url: str = "") -> None:
    for kind in kinds.split(","):
        runs = {}
        for acceptance in ("off", "exact"):
            window = 8 if kind == "smollm2" else 0  # its passes are long, and drafts seldom pay on a CPU
            fill = 64 if mode == "colocate" and acceptance == "exact" else "auto"
            config = RolloutConfig(acceptance=acceptance, measure_every=3, draft_tokens=window, fill=fill)
            with in_float32() if mode == "colocate" and kind != "rloo" else nullcontext():
                runs[acceptance] = summary(run(Path(out, kind, acceptance), config, mode, kind, url))
        Path(out, f"{kind}.json").write_text(json.dumps(runs), encoding="utf-8")
        fills = mode == "colocate" and kind != "environment"
        print(f"{mode}, {kind}: {check(runs, TURNS[kind], fills)}", flush=True)


def check(both: dict[str, Any], turns: int, fills: bool) -> str:
    """Raises AssertionError unless drafts changed nothing and were accepted from the second visit on.

    Args: fills: rows of the next batch had to join the passes of this one.
    """
    off, exact = both["off"], both["exact"]
    for name in ("tokens", "keys", "loss", "reward", "weights", "turns"):
        assert off[name] == exact[name], name
    assert max(exact["turns"]) == turns
    assert len(set(exact["keys"])) == len(exact["keys"])
    assert not any(off["accepted"])
    assert exact["accepted"][-1] > 0
    assert exact["ahead"] or not fills
    last = [sum(each["passes"][-2:]) for each in (exact, off)]  # the last visit of both prompts
    assert last[0] < 0.9 * last[1], f"the last visit took {last[0]} passes, and {last[1]} without drafts"
    assert exact["spec/flips_per_1k"] == [0.0] * len(exact["spec/speedup"])
    assert max(exact["gap"], default=0) < 1e-3, "vLLM has the trainer's weights, up to rounding"
    passes = ", ".join(f"{sum(each['passes'])} passes {name}" for name, each in both.items())
    return f"equal in {len(exact['keys'])} responses of up to {turns} turns; {passes}"


def run(folder: Path, config: RolloutConfig, mode: str, kind: str, url: str) -> Run:
    """Three epochs of a script."""
    options: dict[str, Any] = {"num_train_epochs": 3}
    if mode == "server":
        options |= {"use_vllm": True, "vllm_mode": mode, "vllm_server_base_url": url}
    elif mode == "colocate":
        options |= {"use_vllm": True, "vllm_mode": mode, "vllm_max_model_length": 900}
        options["vllm_gpu_memory_utilization"] = 0.1
    if kind == "smollm2":
        options |= {"max_completion_length": 16, "temperature": 0.3, "learning_rate": 1e-6, "policy": real}
        # it would weigh by vLLM's log-probs, whose last bits depend on how many tokens a pass of this model has
        options |= {"vllm_importance_sampling_correction": False}
        return train(folder, config, None, make, **options)
    if kind in ("single", "rloo"):
        options |= {"kind": "rloo" if kind == "rloo" else "grpo", "max_completion_length": 100}
        return train(folder, config, None, make, **options)
    return train(folder, config, None, make_conversations, tools=kind, **options)


def real() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The real language model and its tokenizer."""
    return load(directory())


def in_float32() -> AbstractContextManager:
    """The engines that TRL starts in its process compute in float32."""
    from specrl.rollout.engines.vllm import colocated

    return mock.patch.object(colocated, "KeyedLLM", partial(colocated.KeyedLLM, dtype="float32"))


def summary(run: Run) -> dict:
    """What two runs are compared by."""
    return {
        "tokens": [batch.tokens for batch in run.batches],
        "logprobs": [c.logprobs for b in run.batches for turn in b.turns for c in turn.batch.completions],
        "keys": run.keys,
        "turns": [len(batch.turns) for batch in run.batches],
        "accepted": [batch.accepted for batch in run.batches],
        "passes": [sum(turn.batch.stats.passes for turn in batch.turns) for batch in run.batches],
        "weights": [float(tensor.double().sum()) for tensor in run.weights.values()],
        "ahead": sum(text is not None for batch in run.training for text in batch.turns[0].batch.ahead),
        **{name: run.logged(name) for name in ("loss", "reward", "spec/speedup", "spec/flips_per_1k")},
        "gap": run.logged("sampling/sampling_logp_difference/max"),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
