"""What Ray workers cost, and what a step takes with rollouts ahead.

    python -m benchmarks.research.scaling [output.json] [repeats] [MB,MB,...]

1. Rollouts of the embedded policy by two workers of one thread, and by the engine in this process with two threads, on
   the same rows, in turn.
2. Sending the embedded policy's weights, and the rest of a step (rollout, forward, backward, optimiser).
3. Sending random weights of several sizes to one, two and three workers, and a formula fitted to the seconds.
4. By one and two workers of one thread: a plain rollout, the rest of a step, and verifying what was rolled out with the
   weights of one update before. A formula goes on from these to steps with rollouts ahead by up to a thousand workers
   (benchmarks/research/scaling_law.py).

Needs a quiet machine with two cores. Figures outside the measured sizes are marked as extrapolated.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.research.scaling_law import MB, extrapolate_sync, fit_sync, step_report
from benchmarks.research.scaling_tables import show
from specrl.rollout.build import build_engine
from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.keys import derive_key
from specrl.rollout.sections import ClusterConfig
from specrl.rollout.types import AheadText, Completion, Request
from specrl.rollout.workers.pool import RolloutPool
from specrl.run.cluster import connect
from specrl.run.policy import TINY_PATH
from specrl.run.tasks import Problem, arithmetic
from specrl.tiny import load_tiny
from specrl.trainers.weights import send

ROWS, GROUP, CAP = 64, 8, 160
WORKERS = (1, 2, 3)
STEP_WORKERS = (1, 2)  # a core for each
LEARNING_RATE = 2e-4  # of config=grpo_math


def main(output: str = "", repeats: int = 7, sizes: str = "1,10,100,400") -> None:
    megabytes = [float(size) for size in sizes.split(",")]
    cluster = ClusterConfig(num_workers=sum(WORKERS), object_store_mb=int(3 * max(megabytes)) + 100)
    with connect(cluster):
        embedded = measure_embedded(repeats)
        points = measure_sync(megabytes, repeats)
        torch.set_num_threads(1)  # the trainer's, as many as a worker has
        terms = [measure_terms(workers, repeats) for workers in STEP_WORKERS]
    formula = fit_sync(points)
    report = {"rows": ROWS, **embedded, "sync": points, "law": formula, "extrapolated": extrapolate_sync(formula)}
    report["step"] = step_report(terms, formula, embedded["weights_mb"])
    show(report)
    if output:
        Path(output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def measure_embedded(repeats: int) -> dict[str, float]:
    """Median seconds for the embedded policy: rollouts by both engines, weight sync, the rest of a training step."""
    model, tokenizer = load_tiny()
    spec, prompts = engine_spec(tokenizer), encoded(tokenizer)
    local, pool = build_engine(spec), RolloutPool(spec, ClusterConfig(num_workers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)  # the weights stay, the work is the same
    torch.set_num_threads(2)
    seconds: dict[str, list[float]] = {"in_process": [], "two_workers": [], "sync": [], "train": []}
    for visit in range(repeats + 1):
        requests = asked(prompts, visit)
        seconds["in_process"].append(clock(local.generate, requests))
        seconds["two_workers"].append(clock(pool.generate, requests))
        done, _ = pool.generate(requests)
        check_equal(done, local.generate(requests)[0], "the two engines")
        rows = texts(requests, done)
        seconds["train"].append(clock(train_step, model, optimizer, rows, torch.ones(ROWS)))
        seconds["sync"].append(clock(send, pool, model, visit, rows[0]))
    pool.close()
    medians = {f"{name}_s": statistics.median(values[1:]) for name, values in seconds.items()}  # the first warms up
    step = medians["two_workers_s"] + medians["train_s"] + medians["sync_s"]
    return {
        **medians,
        "workers_over_in_process": medians["two_workers_s"] / medians["in_process_s"],
        "sync_share_of_step": medians["sync_s"] / step,
        "weights_mb": sum(p.numel() * p.element_size() for p in model.parameters()) / MB,
    }


def measure_terms(workers: int, repeats: int) -> dict[str, float]:
    """Median seconds of the terms of a step, one after the other, while the embedded policy learns.

    `unchanged_ratio`: of the texts rolled out with the weights of one update before, how many came out as they were.
    """
    model, tokenizer = load_tiny()
    prompts = encoded(tokenizer)
    pool = RolloutPool(engine_spec(tokenizer), ClusterConfig(num_workers=workers))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0)
    seen: dict[str, list[float]] = {"rollout_s": [], "rest_s": [], "verify_s": [], "sync_s": [], "unchanged_ratio": []}
    requests = asked(prompts, 0, plain=True)
    patience, (done, _) = timed(pool.generate, requests)
    for visit in range(1, repeats + 2):
        rows, gains = texts(requests, done), advantages(tokenizer, done)
        requests = asked(prompts, visit, plain=True)
        ahead = roll_ahead(pool, requests, patience)
        seen["rest_s"].append(clock(train_step, model, optimizer, rows, gains))
        seen["sync_s"].append(clock(send, pool, model, visit, rows[0]))
        verify_s, (verified, _) = timed(pool.generate, drafted(requests, ahead))
        rollout_s, (done, _) = timed(pool.generate, requests)
        check_equal(done, verified, "plain decoding and verification")
        seen["verify_s"].append(verify_s)
        seen["rollout_s"].append(rollout_s)
        same = [list(ahead[r.key].tokens) == c.tokens for r, c in zip(requests, done, strict=True)]
        seen["unchanged_ratio"].append(statistics.fmean(same))
    pool.close()
    medians = {name: statistics.median(values[1:]) for name, values in seen.items()}  # the first warms up
    return {"workers": workers, **medians}


def roll_ahead(pool: RolloutPool, requests: Sequence[Request], patience: float) -> dict[int, AheadText]:
    """Whole texts of the requests by key, by workers that have nothing else to do. Args: patience: between looks."""
    found: dict[int, AheadText] = {}
    while left := [r for r in requests if r.key not in found or found[r.key].finish is None]:
        pool.begin(drafted(left, found))
        pool.generate([])  # leaves every worker to what was begun
        time.sleep(patience)
        found |= pool.stop()[0]
    return found


def drafted(requests: Sequence[Request], ahead: Mapping[int, AheadText]) -> list[Request]:
    """The requests with drafts of what was rolled out ahead of them, as rollout/speculative.py makes them."""
    shared = {request.prompt: PromptTexts() for request in requests}
    found = []
    for request in requests:
        text = ahead.get(request.key)
        drafter = SuffixDrafter(shared[request.prompt], keyed=text.tokens if text else None)
        expected = 1 if text and text.finish else request.expected_tokens
        found.append(replace(request, drafter=drafter, plain=False, expected_tokens=expected))
    return found


def problems() -> list[Problem]:
    return arithmetic("train", ROWS // GROUP, 0, "medium")


def encoded(tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Their prompts."""
    return [tuple(tokenizer(problem.prompt)["input_ids"]) for problem in problems()]


def engine_spec(tokenizer: PreTrainedTokenizerBase) -> EngineSpec:
    rollout = RolloutConfig(max_new_tokens=CAP)
    return EngineSpec(model=str(TINY_PATH), eos_ids=frozenset([tokenizer.eos_token_id]), rollout=rollout)


def asked(prompts: Sequence[tuple[int, ...]], visit: int, plain: bool = False) -> list[Request]:
    """ROWS rows with the noise of a visit, GROUP of each prompt."""
    keys = [derive_key(0, "scaling", i, visit) for i in range(ROWS)]
    return [Request(prompts[i // GROUP], keys[i], CAP, expected_tokens=CAP // 2, plain=plain) for i in range(ROWS)]


def texts(requests: Sequence[Request], done: Sequence[Completion]) -> list[list[int]]:
    return [[*r.prompt, *c.tokens] for r, c in zip(requests, done, strict=True)]


def check_equal(these: Sequence[Completion], those: Sequence[Completion], who: str) -> None:
    if [c.tokens for c in these] != [c.tokens for c in those]:
        raise SystemExit(f"{who} sampled different tokens; the comparison means nothing")


def timed(work: Callable[..., Any], *args: object) -> tuple[float, Any]:
    """Seconds, and what came of them."""
    began = time.perf_counter()
    result = work(*args)
    return time.perf_counter() - began, result


def clock(work: Callable[..., object], *args: object) -> float:
    return timed(work, *args)[0]


def advantages(tokenizer: PreTrainedTokenizerBase, done: Sequence[Completion]) -> Tensor:
    """Of each row, (ROWS,): 1 for a right answer, else 0, less the mean of its prompt's rows."""
    answers = [f"#### {problem.answer}" for problem in problems() for _ in range(GROUP)]
    written = [tokenizer.decode(c.tokens, skip_special_tokens=True) for c in done]
    right = torch.tensor([text.endswith(answer) for text, answer in zip(written, answers, strict=True)]).float()
    groups = right.view(-1, GROUP)
    return (groups - groups.mean(1, keepdim=True)).flatten()


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: list[list[int]], advantages: Tensor
) -> None:
    """Forward, backward and optimiser step of a policy gradient on right-padded rows.

    Args: advantages: (rows,). Where they add up to 0 over the rows of a prompt, the prompt itself gets no gradient.
    """
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    written = torch.tensor([[1.0] * (len(row) - 1) + [0.0] * (width - len(row)) for row in rows])
    logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    (-(advantages[:, None] * written * logp).sum() / written.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


class Sink:
    """An engine that only takes weights: into tensors of its own, as a real one does."""

    def __init__(self, spec: EngineSpec):
        self.own_weights, self.weight_version, self.weights = True, 0, {}

    def update_weights(self, weights, version, probe=None):
        for name, tensor in weights or ():
            self.weights.setdefault(name, torch.empty_like(tensor)).copy_(tensor)

    def close(self):
        self.weights = {}


def measure_sync(megabytes: list[float], repeats: int) -> list[dict[str, float]]:
    """Median seconds of sending weights of each size to pools of each size, in bfloat16 tensors of at most 4 MB."""
    spec = EngineSpec(eos_ids=frozenset(), rollout=RolloutConfig())
    pools = [RolloutPool(spec, ClusterConfig(num_workers=workers), Sink) for workers in WORKERS]
    points = []
    for megabyte in reversed(megabytes):  # the largest first touches the memory that all of them use
        count = max(1, round(megabyte / 4))
        weights = {f"{megabyte}.{i}": torch.randn(int(megabyte * MB / count / 2)).bfloat16() for i in range(count)}
        seconds = [[clock(pool.update_weights, weights.items(), 0) for pool in pools] for _ in range(repeats + 1)]
        points += [
            {"workers": workers, "mb": megabyte, "seconds": statistics.median(column[1:])}  # the first warms up
            for workers, column in zip(WORKERS, zip(*seconds, strict=True), strict=True)
        ]
    for pool in pools:
        pool.close()
    return points


if __name__ == "__main__":
    main(*(kind(word) for kind, word in zip((str, int, str), sys.argv[1:], strict=False)))
