"""Whole steps of a TRL script whose vLLM server works ahead, and without: `python -m benchmarks.trl_ahead out=FILE`.

Pairs of runs take turns, each with a trainer of its own and the same server. Trainer and server have a CPU core each,
as they would have a GPU each. All runs must end with the same weights. It is the first epoch: every prompt comes once.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import requests

from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.rollout.sections import doc
from specrl.rollout.types import RolloutError
from specrl.run.machine import machine
from specrl.run.policy import TINY_PATH

STARTS_WITHIN = 180.0
SERVER = f"--model {TINY_PATH} --served-model-name tiny --dtype float32 --enforce-eager --block-size 32"


@dataclass
class TRLAheadConfig:
    repeats: int = doc(5, "pairs of runs", low=1)
    steps: int = doc(12, "optimiser steps of a run", low=3)
    prompts: int = doc(2, "prompts of a step, each with 8 responses", low=1)
    out: str = doc("", "write the figures to this JSON file too")
    url: str = doc("", "of a server, for the run of a pair")
    ahead: Literal["auto", "off"] = doc("auto", "of that run")


def train(config: TRLAheadConfig) -> dict[str, Any]:
    """One run: seconds and what was ahead of each step but the first two, and a digest of its weights."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from specrl import reusing
    from specrl.rollout.config import RolloutConfig
    from specrl.run.tasks import arithmetic
    from specrl.tiny import load_tiny

    began: list[float] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended.append(time.perf_counter())

    ended: list[float] = []
    problems = {p.prompt: p.answer for p in arithmetic("train", config.steps * config.prompts, 0, "medium")}
    rows = 8 * config.prompts
    with tempfile.TemporaryDirectory(prefix="specrl-trl-") as folder:
        args = GRPOConfig(
            folder,
            use_cpu=True,
            bf16=False,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=config.url,
            num_generations=8,
            per_device_train_batch_size=rows,
            max_completion_length=200,
            learning_rate=2e-5,
            lr_scheduler_type="constant",
            max_steps=config.steps,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
            shuffle_dataset=False,
        )
        model, tokenizer = load_tiny()
        trainer = reusing(GRPOTrainer, RolloutConfig(ahead=config.ahead, measure_every=0))(
            model,
            lambda prompts, completions, **_: [
                float(problems[p] in c) for p, c in zip(prompts, completions, strict=True)
            ],
            args=args,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in problems]),
            processing_class=tokenizer,
            callbacks=[Watch()],
        )
        trainer.train()
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().numpy().tobytes())
    logs = [log for log in trainer.state.log_history if "spec/ahead_done_ratio" in log][2:]
    return {
        "seconds": (ended[-1] - began[2]) / (config.steps - 2),  # a step's rollout comes after on_step_begin
        "complete": statistics.fmean(log["spec/ahead_done_ratio"] for log in logs) if logs else 0.0,
        "unchanged": statistics.fmean(log["spec/ahead_unchanged_ratio"] for log in logs) if logs else 0.0,
        "reward": [log["reward"] for log in trainer.state.log_history if "reward" in log],
        "weights": digest.hexdigest(),
    }


@contextmanager
def server(core: int) -> Iterator[str]:
    """The address of `specrl.serve` with the embedded policy, on one core."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "specrl.serve", *SERVER.split(), "--port", str(port), "--max-model-len", "512"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + STARTS_WITHIN
        while True:
            try:
                requests.get(f"{url}/health", timeout=5).raise_for_status()
                break
            except requests.RequestException as error:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RolloutError("the server did not start") from error
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def run(config: TRLAheadConfig, url: str, ahead: str, core: int) -> dict[str, Any]:
    """One run in a process of its own, on one core."""
    words = [f"url={url}", f"ahead={ahead}", f"steps={config.steps}", f"prompts={config.prompts}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.trl_ahead", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RolloutError(f"the run with ahead={ahead} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(config: TRLAheadConfig) -> int:
    if config.url:
        print(json.dumps(train(config)))
        return 0
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError(f"trainer and server need a core each, and there is {len(cores)}.")
    pairs = []
    with server(cores[1]) as url:
        for i in range(config.repeats):
            order = ("auto", "off") if i % 2 else ("off", "auto")
            pair = {ahead: run(config, url, ahead, cores[0]) for ahead in order}
            if len({side["weights"] for side in pair.values()}) > 1:
                raise RolloutError(
                    "the run with a server that works ahead ends with other weights than the one without"
                )
            pairs.append(pair)
            print(f"{pair['off']['seconds']:.2f} s a step, ahead {pair['auto']['seconds']:.2f} s", flush=True)
    ratios = [pair["off"]["seconds"] / pair["auto"]["seconds"] for pair in pairs]
    sides = {side: statistics.median(pair[side]["seconds"] for pair in pairs) for side in ("off", "auto")}
    shares = {name: statistics.fmean(pair["auto"][name] for pair in pairs) for name in ("complete", "unchanged")}
    result = {
        "speedup": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "seconds": sides,
        **shares,
    }
    print(json.dumps(result))
    if config.out:
        result |= {"rows": 8 * config.prompts, "steps": config.steps, "machine": machine()}
        Path(config.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, sys.argv[1:], TRLAheadConfig))
