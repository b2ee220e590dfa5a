"""Training runs small enough for a test: a random policy and a recorder; their rewards are in `rewards.py`."""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import specrl.train
import specrl.trainers.grpo.trainer
from benchmarks.tiny_policy import build_tokenizer
from specrl.config import load as cli
from specrl.drafter import shortened
from tests.models import random_model

ROOT = Path(__file__).parents[1]
SHORT = {
    "dataset__train_size": 4,
    "rollout__max_new_tokens": 20,
    "trainer__epochs": 2,
    "trainer__prompts_per_step": 2,
}


def build_policy(folder: Path, seed: int = 0, **sizes) -> Path:
    """A random two-layer Qwen3 whose text varies without being uniform, and that ends about half of its responses."""
    tokenizer = build_tokenizer()
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["?", "."])]
    usual = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": ends, "intermediate_size": 64}
    model = random_model("qwen3", seed, scale=60, **{**usual, "tie_word_embeddings": True, **sizes})
    model.generation_config = GenerationConfig(do_sample=True, pad_token_id=0, eos_token_id=ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def drafter(folder: Path) -> str:
    """A draft model for `policy()`: a copy of its first layer."""
    shortened(AutoModelForCausalLM.from_pretrained(policy()), 1).save_pretrained(folder)
    return str(folder)


@cache
def policy() -> Path:
    """The folder of one shared policy, removed when the tests end."""
    folder = Path(tempfile.mkdtemp(prefix="specrl-policy-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    gc.freeze()  # a run collects garbage when it begins, which takes long with every module loaded
    return build_policy(folder)


def words(folder: Path, **options) -> list[str]:
    """The command line of a small run: 12 prompts, 3 steps an epoch, 3 epochs, 16 rows of at most 28 tokens a step.
    With `**SHORT`, where nothing needs more: 4 prompts, 2 steps an epoch, 2 epochs, 8 rows of at most 20 tokens.

    Dots in option names are written as two underscores: `rollout__replay=0.5`.
    """
    small = {
        "config": "grpo_math",
        "name": "run",
        "output_dir": str(folder),
        "model": options.get("model") or str(policy()),
        "data": "arithmetic:easy",
        "dataset__train_size": 12,
        "dataset__test_size": 8,
        "rollout__group_size": 4,
        "rollout__max_new_tokens": 28,
        "rollout__measure_every": 0,
        "rollout__draft_tokens": 8,  # fixed, so that drafting does not depend on the load of the machine
        "trainer__epochs": 3,
        "trainer__prompts_per_step": 4,
        "trainer__learning_rate": 1e-3,
        "trainer__lr_schedule": "constant",
        "trainer__eval_prompts": 0,
        "reward__functions": "[tests.rewards:digits]",
        "reward__timeout_s": 60,
        "report__plots": "false",
    }
    return [f"{key.replace('__', '.')}={value}" for key, value in (small | options).items()]


def command(folder: Path, *more: str, **options) -> list[str]:
    """The command line of what trains nothing, on the model and data of a small run; later words win."""
    found = [*(word for word in words(folder, **options) if not word.startswith("trainer.")), *more]
    return list({word.partition("=")[0]: word for word in found}.values())


@dataclass
class Step:
    """One rollout batch as it was trained on."""

    step: int
    ids: list[str]
    sample_indices: list[int]
    keys: list[int]
    tokens: list[list[int]]
    finish: list[str]
    rewards: list[float | None]
    reused: list[list[bool]]
    metrics: dict[str, float]

    @property
    def rows(self) -> list[tuple[str, int]]:
        return list(zip(self.ids, self.sample_indices, strict=True))

    @property
    def reuse(self) -> float:
        return sum(map(sum, self.reused)) / sum(map(len, self.reused))


@dataclass
class Recording:
    """The parts of a run that can be compared with another."""

    trainer: object = None
    folder: Path | None = None
    steps: list[Step] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """One per forward/backward pass, bit for bit."""

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.trainer.accelerator.unwrap_model(self.trainer.model).state_dict()

    def __add__(self, later: Recording) -> Recording:
        return Recording(later.trainer, later.folder, self.steps + later.steps, self.losses + later.losses)


def run(folder: Path, prepare: Callable = lambda trainer: None, *, report: bool = False, **options) -> Recording:
    """`specrl.train` in this process, recorded.

    Args:
        prepare: called with the trainer before it starts, which it may sabotage.
        report: write the report too, which takes a third of the time.
    """
    record = Recording()
    watch = specrl.train.watch

    def spy(begun, monitor):
        watch(begun, monitor)
        record.trainer, record.folder = begun.trainer, begun.path
        listen(begun.trainer, record)
        prepare(begun.trainer)

    with mock.patch.object(specrl.train, "watch", spy), nullcontext() if report else unreported():
        assert specrl.train.main(cli.load(words(folder, **options))) == 0
    return record


def unreported():
    """A context in which runs write no report."""
    from specrl.run.run import Run

    return mock.patch.object(Run, "report")


_recorded: dict[tuple, Recording] = {}


def recorded(**options) -> Recording:
    """The recording of a run, made once for all tests of this process; tests must not change it."""
    key = tuple(sorted(options.items()))
    if key not in _recorded:
        _recorded[key] = run(_shared_folder(), name=f"run{len(_recorded)}", **options)
    return _recorded[key]


@cache
def _shared_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="specrl-runs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def logs(record: Recording) -> list[dict]:
    """The log entries of a trainer's updates."""
    return [log for log in record.trainer.state.log_history if "loss" in log]


def listen(trainer, record: Recording) -> None:
    """Records every rollout and every loss of the trainer."""
    finish, training_step = trainer.rollouts.finish, trainer.training_step

    def recorded_finish():
        metrics = finish()
        rollout = trainer.rollouts.sampled_batch
        completions = rollout.batch.completions
        record.steps.append(
            Step(
                step=trainer.rollouts.version,
                ids=[row.example_id for row in rollout.rows],
                sample_indices=list(rollout.batch.sample_indices),
                keys=list(rollout.batch.keys),
                tokens=[list(c.tokens) for c in completions],
                finish=[c.finish for c in completions],
                rewards=list(rollout.rewards),
                reused=[list(c.reused) for c in completions],
                metrics=dict(metrics),
            )
        )
        return metrics

    def recorded_training_step(*args, **kwargs):
        loss = training_step(*args, **kwargs)
        record.losses.append(loss.item())
        return loss

    trainer.rollouts.finish = recorded_finish
    trainer.training_step = recorded_training_step


def differences(a: Recording, b: Recording) -> list[str]:
    """The parts of two runs that are not bit-identical."""
    found = []
    if len(a.steps) != len(b.steps):
        found.append(f"{len(a.steps)} rollouts against {len(b.steps)}")
    for x, y in zip(a.steps, b.steps, strict=False):
        names = ("step", "ids", "sample_indices", "keys", "tokens", "finish", "rewards")
        found += [f"{name} of step {x.step}" for name in names if getattr(x, name) != getattr(y, name)]
    if a.losses != b.losses:
        found.append("losses")
    left, right = a.weights, b.weights
    if left.keys() != right.keys() or not all(torch.equal(tensor, right[name]) for name, tensor in left.items()):
        found.append("weights")
    return found


class Watch:
    """Seconds of some calls in each step, measured independently of the product.

    `run(folder, watch)` times a trainer's calls: `gen`, a rollout without its store; `engine`, the engine's
    part of it; `control`; `reuse_gap`; `drafter`; and `update`, backward passes alone.
    """

    def __init__(self):
        self.seconds: dict[int, Counter] = defaultdict(Counter)

    def __call__(self, trainer) -> None:
        rollout, inside = trainer.rollouts.source, []
        self._time(trainer, rollout, "generate", lambda call: PARTS[call.get("domain", "rollout")], inside)
        self._time(trainer, rollout, "plain", lambda call: "control", inside)
        self._time(trainer, rollout.engine, "generate", lambda call: "engine" if inside == ["gen"] else "", [])
        self._time(trainer, trainer.accelerator, "backward", lambda call: "update", [])
        if drafter := trainer.rollouts.drafter_trainer:
            for name in ("observe", "step"):
                self._time(trainer, drafter, name, lambda call: "drafter", [])

    def _time(self, trainer, owner, name: str, part: Callable[[dict], str], inside: list[str]) -> None:
        call = getattr(owner, name)

        def timed(*args, **options):
            key = part(options)
            # co-training's step comes after the optimiser's, which counts it
            step = trainer.state.global_step + (name != "step")
            inside.append(key)
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.seconds[step][key] += time.perf_counter() - began
                inside.pop()

        setattr(owner, name, timed)

    def check(self, line: dict) -> None:
        """Asserts that the recorded seconds of a step agree with the watch where one span contains another."""
        seen = self.seconds[line["step"]]
        recorded = {key: line.get(f"timing_s/{key}") or 0.0 for key in TIMED}
        assert 0.0 < seen["engine"] <= recorded["gen"], "the engine is part of the rollout, drafting too"
        assert recorded["gen"] - recorded["store"] <= seen["gen"]
        for key in ("control", "reuse_gap", "drafter"):
            assert recorded[key] <= seen[key]
            assert (recorded[key] > 0.0) == (seen[key] > 0.0)
        assert 0.0 < seen["update"] <= recorded["update"], "the rest of a step contains the backward passes"
        assert sum(seen[key] for key in ("gen", "control", "reuse_gap", "drafter", "update")) <= recorded["step"]


PARTS = {"rollout": "gen", "control": "reuse_gap", "eval": "eval"}
"""What a rollout of each domain is part of."""
TIMED = ("gen", "store", "control", "reuse_gap", "drafter", "update", "step")


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


SPARE_VLLM = "from specrl.trainers.grpo import spare_vllm\nspare_vllm()\n"
"""The beginning of a program that calls `specrl.train.main`, as the command does: importing vLLM takes seconds."""


def start_two_processes(program: str, arguments: Sequence[str], **environment: str) -> list[subprocess.Popen]:
    """Starts a program in two CPU processes, as torchrun does; their output is text."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    shared |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **environment}
    return [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]


def by_two_processes(folder: Path, program: str, timeout: float, **environment: str) -> tuple[list[dict], list[str]]:
    """Runs a program in two CPU processes: the content of rank0.json and rank1.json in the folder, and the outputs."""
    processes = start_two_processes(program, [str(folder)], **environment)
    outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)[-6000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)], outputs
