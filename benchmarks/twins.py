"""What a twin run saves, and that it changes nothing: `python -m benchmarks.twins out=FILE [key=value ...]`.

Run A keeps its texts (rollout.cache.log=true). Each arm B has other settings and the same seed, and is trained without
and with rollout.twin=A. Both must end with the same bytes, also with a damaged log and that of another run among the
files. Passes are counted, with costs by a formula in the place of measured seconds, so that counts repeat.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import specrl.train
from benchmarks.ahead import WEIGHTS, rounded
from specrl.config import load as cli
from specrl.config import options
from specrl.config.schema import Config
from specrl.results import tables
from specrl.results.records import epoch, load_run, mean, total
from specrl.rollout.drafting.budget import Budget
from specrl.rollout.sections import doc
from specrl.rollout.types import RolloutError
from specrl.run.machine import machine
from specrl.tiny import load_tiny

PASS_S, ROW_S, TOKEN_S, ASK_S = 10e-3, 2e-5, 3e-5, 2e-4
"""Seconds of a pass, of each of its rows and tokens, and of asking the drafters: as 32 rows on two cores."""
SETTINGS = {
    "config": "grpo_math",
    "dataset.train_size": "16",
    "trainer.prompts_per_step": "4",
    "rollout.group_size": "8",
    "trainer.epochs": "3",
    "trainer.learning_rate": "2e-4",
    "rollout.measure_every": "0",
    "trainer.eval_prompts": "0",
    "report.plots": "false",
}
"""Options of all runs, unless the command line has others."""
ARMS = {
    "the same again": {},
    "beta 0.02": {"trainer.beta": "0.02"},
    "lr x 0.5": {"trainer.learning_rate": "1e-4"},
    "lr x 2": {"trainer.learning_rate": "4e-4"},
    "weights + 1e-3 noise": {"model": "NOISY"},
    "dapo's loss": {"trainer.loss": "dapo", "trainer.clip_high": "0.28"},
    "ppo": {"config": "ppo_math"},
}
"""What B has other than A; NOISY stands for a directory that is written for the run."""
DAMAGED = "beta 0.02"
"""The arm that is trained with damaged logs too."""


@dataclass
class TwinsConfig(Config):
    arms: list[str] = doc([*ARMS], "what B has other than A")
    out: str = doc("", "write the figures to this JSON file too")


def main(config: TwinsConfig, words: Sequence[str]) -> int:
    given = {key: value for key, value in options.parse(words).items() if key not in ("arms", "out")}
    arms = config.arms
    fixed_costs()
    with tempfile.TemporaryDirectory(prefix="specrl-twins-") as name:
        folder = Path(name)
        a = train(folder, given, "a", {"rollout.cache.log": "true"})
        lines = [arm(folder, given, name, a) for name in arms]
        result = {"log": log_of(a), "arms": lines}
        if DAMAGED in arms:
            result["weights"] = identities(folder, given, a)
    show(lines)
    print(json.dumps({key: value for key, value in result.items() if key != "arms"}, indent=1))
    if config.out:
        result |= {"words": [word for word in words if not word.startswith("out=")], "machine": machine()}
        Path(config.out).write_text(json.dumps(rounded(result), indent=1) + "\n", encoding="utf-8")
    return 0


def fixed_costs() -> None:
    """The draft budget sees a formula in the place of measured seconds."""
    calibrate, observe = Budget.calibrate, Budget.observe_pass

    def calibrated(budget, passes, rows=0, width=0):
        calibrate(budget, [(tokens, cost(tokens, rows)) for tokens, _ in passes], rows, width)

    def observed(budget, tokens, seconds, rows=0, width=0, emitted=0, asking=None, **more):
        observe(budget, tokens, cost(tokens, rows), rows, width, emitted, None if asking is None else ASK_S, **more)

    Budget.calibrate = calibrated  # type: ignore[method-assign]
    Budget.observe_pass = observed  # type: ignore[method-assign]


def cost(tokens: int, rows: int) -> float:
    return PASS_S + ROW_S * rows + TOKEN_S * tokens


def train(folder: Path, given: Mapping[str, str], name: str, more: Mapping[str, str]) -> Path:
    """A finished run. Raises RolloutError if it fails."""
    words = {**given, **more, "name": name, "output_dir": str(folder)}
    if code := specrl.train.main(cli.load([f"{key}={value}" for key, value in words.items()])):
        raise RolloutError(f"the run {name} ended with code {code}")
    return folder / name


def arm(folder: Path, given: Mapping[str, str], name: str, a: Path) -> dict[str, Any]:
    """Passes of one arm by epoch, without and with the log of A. Raises RolloutError if the weights differ."""
    slug = re.sub(r"\W+", "-", name)
    other = dict(ARMS[name])
    if "model" in other:
        other["model"] = noisy_policy(folder / "policy")
    without = train(folder, given, slug, other)
    twin = train(folder, given, f"{slug}-twin", {**other, "rollout.twin": str(a)})
    if digest(without) != digest(twin):
        raise RolloutError(f"{name}: the run with a twin ends with other weights than the one without")
    return {"arm": name, "weights": digest(twin), "without": by_epoch(without), "with": by_epoch(twin)}


def noisy_policy(folder: Path) -> str:
    """The embedded policy with Gaussian noise of 1e-3 on all weights, saved in `folder`."""
    model, tokenizer = load_tiny()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=1e-3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def by_epoch(run: Path) -> list[dict[str, float | None]]:
    steps = load_run(run).steps
    lines = []
    for n in range(1, round(epoch(steps[-1])) + 1):
        part = [record for record in steps if n - 1 + 1e-6 < epoch(record) <= n + 1e-6]
        names = ("passes_per_row", "passes_max", "twin_hit_rate", "twin_unchanged_ratio", "forward_tokens")
        lines.append({name: mean(part, f"spec/{name}") for name in names} | {"gen_s": total(part, "timing_s/gen")})
    return lines


def log_of(a: Path) -> dict[str, float]:
    """Size of the log, and what writing it took from the rollouts."""
    steps = load_run(a).steps
    tokens = total(steps, "spec/reused_tokens") + total(steps, "spec/new_tokens")
    size = sum(file.stat().st_size for file in (a / "texts").iterdir())
    store = total(steps, "timing_s/store")
    return {"bytes": size, "tokens": tokens, "bytes_a_token": size / tokens, "store_s": store}


def identities(folder: Path, given: Mapping[str, str], a: Path) -> dict[str, str]:
    """Digests of the weights with a sound, a damaged, a partly foreign and no log; raises RolloutError unless equal."""
    slug = re.sub(r"\W+", "-", DAMAGED)
    digests = {"no log": digest(folder / slug), "sound": digest(folder / f"{slug}-twin")}
    stranger = train(folder, given, "stranger", {"seed": "7", "rollout.cache.log": "true", "trainer.epochs": "1"})
    for name in ("damaged", "foreign"):
        copy = folder / f"log-{name}"
        shutil.copytree(a, copy)
        for i, file in enumerate(sorted((copy / "texts").iterdir())):
            if name == "damaged":
                data = bytearray(file.read_bytes())
                data[len(data) // 3] ^= 16
                file.write_bytes(data[: len(data) // 2] if i % 2 else data)
            elif (other := stranger / "texts" / file.name).exists():
                shutil.copy(other, file)
        run = train(folder, given, f"{slug}-{name}", {**ARMS[DAMAGED], "rollout.twin": str(copy)})
        digests[name] = digest(run)
    if len({*digests.values()}) > 1:
        raise RolloutError(f"the log decides the weights: {digests}")
    return digests


def digest(run: Path) -> str:
    return hashlib.sha256((run / WEIGHTS).read_bytes()).hexdigest()


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Mean and slowest row's passes of each epoch."""
    from rich.console import Console

    epochs = range(len(lines[0]["with"]))
    columns = ["B", *(f"epoch {n + 1} {side}" for n in epochs for side in ("without", "with"))]
    rows = [
        [line["arm"], *(f"{e['passes_per_row']:.1f} / {e['passes_max']:.1f}" for n in epochs for e in sides(line, n))]
        for line in lines
    ]
    tables.show(Console(width=160), "Passes of a row: mean / slowest", columns, rows)


def sides(line: Mapping[str, Any], n: int) -> tuple[dict, dict]:
    return line["without"][n], line["with"][n]


if __name__ == "__main__":
    keys = {word.partition("=")[0] for word in sys.argv[1:]}
    words = [*(f"{key}={value}" for key, value in SETTINGS.items() if key not in keys), *sys.argv[1:]]
    raise SystemExit(cli.run(partial(main, words=words), words, TwinsConfig))
