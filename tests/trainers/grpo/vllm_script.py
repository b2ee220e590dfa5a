"""Trains by TRL with vLLM, with drafts and without, and writes what was generated: a program of test_trl_vllm.py.

    python -m tests.trainers.grpo.vllm_script OUT MODE KIND,KIND,... [URL]

MODE: colocate or server. KIND: single, rloo, tools, async or environment. The colocated engine computes in float32, so
that its log-probs can be compared with the trainer's; with rloo in bfloat16, as TRL starts it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.vllm import colocated
from tests.trainers.grpo.scripts import Run, make, make_conversations, train


class Float32LLM(colocated.KeyedLLM):
    def __init__(self, **options):
        super().__init__(**options, dtype="float32")


def main(out: str, mode: str, kinds: str, url: str = "") -> None:
    keyed = colocated.KeyedLLM
    for kind in kinds.split(","):
        colocated.KeyedLLM = keyed if kind == "rloo" else Float32LLM
        runs = {}
        for acceptance in ("off", "exact"):
            config = RolloutConfig(acceptance=acceptance, measure_every=3)
            runs[acceptance] = summary(run(Path(out, kind, acceptance), config, mode, kind, url))
        Path(out, f"{kind}.json").write_text(json.dumps(runs), encoding="utf-8")


def run(folder: Path, config: RolloutConfig, mode: str, kind: str, url: str) -> Run:
    """Three epochs of a script."""
    options = {"use_vllm": True, "vllm_mode": mode, "num_train_epochs": 3}
    if mode == "server":
        options["vllm_server_base_url"] = url
    else:
        options |= {"vllm_max_model_length": 900, "vllm_gpu_memory_utilization": 0.1}
    if kind in ("single", "rloo"):
        options |= {"kind": "rloo" if kind == "rloo" else "grpo", "max_completion_length": 100}
        return train(folder, config, None, make, **options)
    return train(folder, config, None, make_conversations, tools=kind, **options)


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
        **{name: run.logged(name) for name in ("loss", "reward", "spec/speedup", "spec/flips_per_1k")},
        "gap": run.logged("sampling/sampling_logp_difference/max"),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
