"""What Ray workers cost: `python benchmarks/scaling.py [output.json] [repeats] [MB,MB,...]`.

1. Rollouts of the embedded policy by two workers of one thread against the engine in this process with two threads, on
   the same rows, in turn.
2. Sending the embedded policy's weights against the rest of a step (rollout, forward, backward, optimiser).
3. Sending random weights of several sizes to one, two and three workers, and the law that the seconds follow.

Run it on a quiet machine with two cores. What lies outside the measured sizes is marked as extrapolated.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import torch

from rollout.build import build_engine
from rollout.config import ClusterConfig, RolloutConfig
from rollout.engines.base import EngineSpec
from rollout.keys import derive_key
from rollout.types import Request
from rollout.workers.pool import RolloutPool
from specrl.run.cluster import connect
from specrl.run.tasks import arithmetic
from specrl.tiny import TINY_PATH, load_tiny
from trainers.weights import send

ROWS, GROUP, CAP = 64, 8, 160
WORKERS = (1, 2, 3)
MODELS = {"0.5B": 0.5e9, "1.5B": 1.5e9, "7B": 7e9}  # parameters, sent as bfloat16
MB = 1e6


def main(output: str = "", repeats: int = 7, sizes: str = "1,10,100,400") -> None:
    megabytes = [float(size) for size in sizes.split(",")]
    cluster = ClusterConfig(num_workers=sum(WORKERS), object_store_mb=int(3 * max(megabytes)) + 100)
    with connect(cluster):
        embedded = measure_embedded(repeats)
        points = measure_sync(megabytes, repeats)
    law = fit(points)
    report = {**embedded, "sync": points, "law": law, "extrapolated": extrapolate(law)}
    show(report)
    if output:
        Path(output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def measure_embedded(repeats: int) -> dict[str, float]:
    """Median seconds for the embedded policy: rollouts by both engines, weight sync, the rest of a training step."""
    model, tokenizer = load_tiny()
    spec = EngineSpec(
        model=str(TINY_PATH),
        eos_ids=frozenset([tokenizer.eos_token_id]),
        rollout=RolloutConfig(max_new_tokens=CAP),
    )
    prompts = [tuple(tokenizer(p.prompt)["input_ids"]) for p in arithmetic("train", ROWS // GROUP, 0, "medium")]
    local, pool = build_engine(spec), RolloutPool(spec, ClusterConfig(num_workers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)  # the weights stay, the work is the same
    torch.set_num_threads(2)
    seconds: dict[str, list[float]] = {"in_process": [], "two_workers": [], "sync": [], "train": []}
    for visit in range(repeats + 1):
        requests = [
            Request(prompts[i // GROUP], derive_key(0, "scaling", i, visit), CAP, expected_tokens=CAP // 2)
            for i in range(ROWS)
        ]
        seconds["in_process"].append(clock(local.generate, requests))
        seconds["two_workers"].append(clock(pool.generate, requests))
        done, _ = pool.generate(requests)
        if [c.tokens for c in done] != [c.tokens for c in local.generate(requests)[0]]:
            raise SystemExit("the two engines sampled different tokens; the comparison means nothing")
        rows = [[*r.prompt, *c.tokens] for r, c in zip(requests, done, strict=True)]
        seconds["train"].append(clock(train_step, model, optimizer, rows))
        seconds["sync"].append(clock(send, pool, model, visit, rows[0]))
    pool.close()
    medians = {f"{name}_s": statistics.median(values[1:]) for name, values in seconds.items()}  # the first warms up
    step = medians["two_workers_s"] + medians["train_s"] + medians["sync_s"]
    return {
        **medians,
        "workers_over_in_process": medians["two_workers_s"] / medians["in_process_s"],
        "sync_share_of_step": medians["sync_s"] / step,
    }


def clock(work: Callable[..., object], *args: object) -> float:
    began = time.perf_counter()
    work(*args)
    return time.perf_counter() - began


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: list[list[int]]) -> None:
    """Forward, backward and optimiser step on right-padded rows, as heavy as one policy-gradient update."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    (-logp.mean()).backward()
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


def fit(points: list[dict[str, float]]) -> dict[str, float]:
    """The law t = a + mb / put + workers * (b + mb / copy): least squares of relative errors, no negative term."""
    terms = {
        "a": lambda p: 1.0,
        "put": lambda p: p["mb"],
        "b": lambda p: p["workers"],
        "copy": lambda p: p["workers"] * p["mb"],
    }
    names = list(terms)
    while True:
        matrix = np.array([[terms[name](p) / p["seconds"] for name in names] for p in points])
        solution = np.linalg.lstsq(matrix, np.ones(len(points)), rcond=None)[0]
        if (solution >= 0).all():
            break
        names.pop(int(solution.argmin()))
    found = dict.fromkeys(terms, 0.0) | dict(zip(names, solution.tolist(), strict=True))
    return {
        "a_s": found["a"],
        "put_s_per_mb": found["put"],
        "b_s_per_worker": found["b"],
        "copy_s_per_worker_mb": found["copy"],
        "largest_relative_error": float(np.abs(matrix @ solution - 1).max()),
    }


def predict(law: dict[str, float], mb: float, workers: int) -> float:
    return law["a_s"] + mb * law["put_s_per_mb"] + workers * (law["b_s_per_worker"] + mb * law["copy_s_per_worker_mb"])


def extrapolate(law: dict[str, float]) -> list[dict[str, float | str]]:
    """Seconds by the law, far outside what was measured and as if all workers shared one machine's memory bus."""
    return [
        {"model": name, "workers": workers, "seconds": predict(law, 2 * parameters / MB, workers)}
        for (name, parameters), workers in product(MODELS.items(), (1, 2, 4, 8, 16, 64))
    ]


def show(report: dict) -> None:
    print(
        f"embedded policy, {ROWS} rows: in process (2 threads) {report['in_process_s']:.3f} s, two workers (1 thread "
        f"each) {report['two_workers_s']:.3f} s, ratio {report['workers_over_in_process']:.3f}\n"
        f"weight sync {report['sync_s'] * 1e3:.1f} ms, training {report['train_s']:.3f} s: "
        f"{report['sync_share_of_step']:.2%} of a step\n\nmeasured sync (seconds)"
    )
    for point in report["sync"]:
        print(f"  {point['mb']:6g} MB, {point['workers']} workers: {point['seconds']:.4f}")
    law = report["law"]
    print(
        f"law: t = {law['a_s']:.4f} + MB * {law['put_s_per_mb']:.6f} + workers * ({law['b_s_per_worker']:.4f} + "
        f"MB * {law['copy_s_per_worker_mb']:.6f}) s, within {law['largest_relative_error']:.0%} of every point\n\n"
        "EXTRAPOLATED by the law, one machine, bfloat16 (seconds)"
    )
    for point in report["extrapolated"]:
        print(f"  {point['model']:>5}, {point['workers']:2} workers: {point['seconds']:.2f}")


if __name__ == "__main__":
    main(*(kind(word) for kind, word in zip((str, int, str), sys.argv[1:], strict=False)))
