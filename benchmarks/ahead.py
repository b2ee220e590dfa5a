"""What rollouts ahead save, and whether they change anything: `python -m benchmarks.ahead out=FILE [key=value ...]`.

Two runs of config=ray_grpo_math (or another) with rollout.ahead=auto and off, in two processes whose steps take turns,
so that neither disturbs the other and both see the same load. Trainer and rollout workers have a core each. The machine
must be quiet and have two cores, and both runs must end with the same bytes.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from specrl.config import load as cli
from specrl.config import options
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.results import tables
from specrl.results.records import epoch, load_run, number
from specrl.rollout.sections import doc
from specrl.rollout.types import RolloutError
from specrl.run.machine import machine

TURNS_FILE = "turns.json"
WEIGHTS = "model/model.safetensors"
OWN = ("case", "repeats", "out")
RUNS = ("off", "auto")
SETTINGS = {
    "config": "ray_grpo_math",
    "cluster.num_workers": "1",
    "trainer.epochs": "3",
    "rollout.measure_every": "0",
    "trainer.eval_prompts": "0",
}
"""Options of both runs, unless the command line has others."""
METRICS = {
    "rollout": "timing_s/gen",
    "reward": "timing_s/reward",
    "passes": "spec/passes_max",
    "tokens": "spec/forward_tokens",
    "ahead": "timing_s/ahead",
    "taken": "spec/ahead_ratio",
    "ended": "spec/ahead_done_ratio",
    "unchanged": "spec/ahead_unchanged_ratio",
    "mb": "spec/ahead_mb",
}
"""Metrics that are taken from a rollout's record; the last five exist with rollouts ahead only."""

Step = dict[str, float]


@dataclass
class AheadConfig(Config):
    case: Literal["history", "fresh"] = doc("history", "fresh: there are no other drafts than what is rolled out ahead")
    repeats: int = doc(5, "pairs of runs, each with another seed", low=1)
    out: str = doc("", "write the figures to this JSON file too")


def main(config: AheadConfig, words: Sequence[str]) -> int:
    if not config.cluster.num_workers:
        raise ConfigError("cluster.num_workers=0: without workers nothing is rolled out ahead. Leave it at 1.")
    if len(os.sched_getaffinity(0)) < 2:
        raise ConfigError("This machine has one usable core; the trainer and its rollout workers need one each.")
    run_options = {key: value for key, value in options.parse(words).items() if key not in OWN}
    if config.case == "fresh":
        run_options["rollout.sources"] = "[]"
    repeats = []
    for seed in range(config.seed, config.seed + config.repeats):
        with tempfile.TemporaryDirectory(prefix="specrl-ahead-") as folder:
            repeats.append(by_epoch(*pair(run_options | {"seed": str(seed), "output_dir": folder}, Path(folder))))
        print(f"seed {seed}: both runs end with the same weights, byte for byte", flush=True)
    epochs = [over_repeats(lines) for lines in zip(*repeats, strict=True)]
    show(epochs, config)
    if config.out:
        result = {"words": list(words), "machine": machine(), "epochs": epochs, "repeats": repeats}
        Path(config.out).write_text(json.dumps(rounded(result), indent=1) + "\n", encoding="utf-8")
    return 0


def with_settings(words: Sequence[str]) -> list[str]:
    """The words of the command line after those of SETTINGS that it does not have."""
    keys = {word.partition("=")[0] for word in words}
    return [*(f"{key}={value}" for key, value in SETTINGS.items() if key not in keys), *words]


# The runs ------------------------------------------------------------------------------------------------------------


def pair(words: Mapping[str, str], folder: Path) -> list[list[Step]]:
    """The steps of the two RUNS, which take turns.

    Raises:
        RolloutError: one failed, or they end with other weights.
    """
    ends = socket.socketpair()
    ends[1].send(b".")  # the first run has the first turn
    processes = [
        start(words | {"name": name, "rollout.ahead": name}, end, folder) for name, end in zip(RUNS, ends, strict=True)
    ]
    codes = [process.wait() for process in processes]
    for name, code in zip(RUNS, codes, strict=True):
        if code:
            log = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace").strip()
            raise RolloutError(f"the run with rollout.ahead={name} ended with code {code}: {log[-2000:]}")
    weights = [(folder / name / WEIGHTS).read_bytes() for name in RUNS]
    if weights[0] != weights[1]:
        raise RolloutError(f"seed={words['seed']}: the run ahead ends with other weights than the one that is not")
    return [steps(folder / name) for name in RUNS]


def start(words: Mapping[str, str], end: socket.socket, folder: Path) -> subprocess.Popen:
    """One run, which waits for its turns at this end of a pair of sockets."""
    command = [sys.executable, "-m", "benchmarks.ahead_run", str(end.fileno())]
    with end, (folder / f"{words['name']}.log").open("w") as log:
        return subprocess.Popen(
            command + [f"{key}={value}" for key, value in words.items()],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            pass_fds=[end.fileno()],
            stdout=log,
            stderr=log,
        )


def steps(folder: Path) -> list[Step]:
    """Seconds of each rollout with its updates, without the first one, which warms up."""
    records = {record["step"]: record for record in load_run(folder).steps}
    steps_of_run = []
    for turn in json.loads((folder / TURNS_FILE).read_text(encoding="utf-8"))[1:]:
        record = records[turn["step"]]
        known = {name: value for name, key in METRICS.items() if (value := number(record, key)) is not None}
        rest = turn["seconds"] - turn["sync"] - known["rollout"]
        steps_of_run.append({**turn, "epoch": math.ceil(epoch(record) - 1e-6), **known, "rest": rest})
    if not steps_of_run:
        raise ConfigError("The first step warms up and the last one has no end: give each run three steps or more.")
    return steps_of_run


# What they say -------------------------------------------------------------------------------------------------------


def by_epoch(off: Sequence[Step], auto: Sequence[Step]) -> list[dict[str, Any]]:
    """Each epoch of the two runs, and all of them together."""
    pairs = list(zip(off, auto, strict=True))
    epochs = {
        str(n): [pair for pair in pairs if pair[0]["epoch"] == n] for n in sorted({step["epoch"] for step in off})
    }
    return [compared(name, part) for name, part in {**epochs, "all": pairs}.items()]


def compared(name: str, pairs: Sequence[tuple[Step, Step]]) -> dict[str, Any]:
    """The means of steps of both runs, the speedup, and the seconds that were due for a step with rollouts ahead.

    These are max(g, u) + v + sync: g is the rollout without, v the one with, u all that is neither rollout nor sync.
    """
    off, auto = (means(side) for side in zip(*pairs, strict=True))
    due = fmean(max(a["rollout"], a["rest"]) + b["rollout"] + b["sync"] for a, b in pairs)
    result = {"epoch": name, "steps": len(pairs), "speedup": off["seconds"] / auto["seconds"]}
    return result | {"due": due, "off": off, "auto": auto}


def over_repeats(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One epoch: the means of its repeats, and the standard error of the speedup, which one repeat does not have."""
    ratios = [line["speedup"] for line in lines]
    error = stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None
    runs = {name: means([line[name] for line in lines]) for name in RUNS}
    return lines[0] | {"speedup": fmean(ratios), "error": error, "due": fmean(line["due"] for line in lines)} | runs


def means(steps: Sequence[Step]) -> Step:
    """The mean of each figure; the step and its epoch are none."""
    return {name: fmean(step[name] for step in steps) for name in steps[0] if name not in ("step", "epoch")}


def show(epochs: Sequence[dict[str, Any]], config: AheadConfig) -> None:
    """The result as a table."""
    from rich.console import Console

    def each(name: str, run: str, form: str = ".3f") -> list[str]:
        return [format(line[run][name], form) for line in epochs]

    def both(name: str) -> list[str]:
        return [f"{line['off'][name]:.0f} -> {line['auto'][name]:.0f}" for line in epochs]

    errors = ["" if line["error"] is None else f" +- {line['error']:.2f}" for line in epochs]
    rows = [
        ("seconds a step, without", *each("seconds", "off")),
        ("with rollouts ahead", *each("seconds", "auto")),
        ("speedup", *(f"{line['speedup']:.2f}x{error}" for line, error in zip(epochs, errors, strict=True))),
        ("g: rollout, without", *each("rollout", "off")),
        ("u: the rest, without", *each("rest", "off")),
        ("v: rollout, with", *each("rollout", "auto")),
        ("sync, with", *each("sync", "auto")),
        ("max(g, u) + v + sync", *(f"{line['due']:.3f}" for line in epochs)),
        ("measured over that", *(f"{line['auto']['seconds'] / line['due'] - 1:+.1%}" for line in epochs)),
        ("worker seconds ahead", *each("ahead", "auto")),
        ("rows ended ahead", *each("ended", "auto", ".1%")),
        ("of all, unchanged", *each("unchanged", "auto", ".1%")),
        ("slowest row's passes", *both("passes")),
        ("tokens of all passes", *both("tokens")),
    ]
    columns = ("", *(line["epoch"] if line["epoch"] == "all" else f"epoch {line['epoch']}" for line in epochs))
    title = f"Rollouts ahead, {config.case}: {config.repeats} x 2 runs, steps in turns"
    tables.show(Console(), title, columns, rows)


def rounded(value: Any) -> Any:
    """With five significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    words = with_settings(sys.argv[1:])
    raise SystemExit(cli.run(partial(main, words=words), words, AheadConfig))
