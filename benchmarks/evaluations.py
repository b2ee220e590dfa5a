"""What drafts save in evaluations: `python -m benchmarks.evaluations out=FILE [key=value ...]`.

A run that evaluates every 8 steps, three times: as it is, without the texts of the last evaluation (which leaves the
sources that need no old text), and with plain decoding. All have the same weights, so their evaluations compare one by
one, and must have equal figures.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import specrl.train
from benchmarks.ahead import rounded
from specrl.config import load as cli
from specrl.config import options
from specrl.config.schema import Config
from specrl.results import tables
from specrl.results.records import EVALUATION_COST, load_run
from specrl.rollout.sections import doc
from specrl.rollout.types import RolloutError
from specrl.run import stored_texts
from specrl.run.machine import machine

SETTINGS = {
    "config": "grpo_math",
    "dataset.train_size": "16",
    "trainer.epochs": "6",
    "trainer.eval_every": "8",
    "rollout.measure_every": "0",
    "report.plots": "false",
}
"""Options of all runs, unless the command line has others."""


@dataclass
class EvaluationsConfig(Config):
    out: str = doc("", "write the figures to this JSON file too")


def main(config: EvaluationsConfig, words: list[str]) -> int:
    given = {key: value for key, value in options.parse(words).items() if key != "out"}
    with tempfile.TemporaryDirectory(prefix="specrl-evaluations-") as name:
        folder = Path(name)
        evals = {"last texts": train(folder, given, "kept")}
        with mock.patch.object(stored_texts, "last_texts", return_value=None):
            evals["no last texts"] = train(folder, given, "without")
        evals["plain"] = train(folder, given | {"rollout.acceptance": "off"}, "plain")
    same = [[figures(record) for record in records] for records in evals.values()]
    if same[1:] != same[:-1]:
        raise RolloutError(f"the evaluations differ: {same}")
    show(evals)
    if config.out:
        result = {
            "words": [word for word in words if not word.startswith("out=")],
            "machine": machine(),
            "evaluations": evals,
        }
        Path(config.out).write_text(json.dumps(rounded(result), indent=1) + "\n", encoding="utf-8")
    return 0


def train(folder: Path, given: dict[str, str], name: str) -> list[dict[str, Any]]:
    """The evaluations of a finished run: step, cost and figures."""
    words = {**given, "name": name, "output_dir": str(folder)}
    if code := specrl.train.main(cli.load([f"{key}={value}" for key, value in words.items()])):
        raise RolloutError(f"the run {name} ended with code {code}")
    return load_run(folder / name).evals


def figures(record: dict[str, Any]) -> dict[str, Any]:
    """What an evaluation says about the policy."""
    return {key: value for key, value in record.items() if key.startswith("eval/") and key not in EVALUATION_COST}


def cell(record: dict[str, Any]) -> str:
    mean, slowest, seconds = (record[f"eval/{name}"] for name in ("passes_per_row", "passes_max", "gen_s"))
    return f"{mean:.1f} / {slowest:.0f} / {seconds:.1f} s"


def show(evals: dict[str, list[dict[str, Any]]]) -> None:
    from rich.console import Console

    rows = [[name, *map(cell, records)] for name, records in evals.items()]
    columns = ["drafts", *(f"step {record['step']}" for record in evals["plain"])]
    tables.show(Console(width=140), "Evaluations: passes of the mean / slowest row / seconds", columns, rows)


if __name__ == "__main__":
    keys = {word.partition("=")[0] for word in sys.argv[1:]}
    words = [*(f"{key}={value}" for key, value in SETTINGS.items() if key not in keys), *sys.argv[1:]]
    raise SystemExit(cli.run(partial(main, words=words), words, EvaluationsConfig))
