"""The figures that README and docs show: `python -m benchmarks.figures [measure=[train,vllm]]`.

`measure` runs the commands of the named figures (`all` for every figure) and writes one file for each to
benchmarks/results: the commands, the commit, the machine, the versions and the result. Then the README's picture is
drawn and the pages are rendered: the text between `<!-- figure: BLOCK -->` and `<!-- /figure -->` is written anew from
the files. Measure on a quiet machine and a clean commit.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import picture
from benchmarks.pages import PAGES, RESULTS, ROOT, rendered
from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.results.report import write_report
from specrl.rollout.sections import doc
from specrl.run.machine import machine

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
NO_EVALUATION = "trainer.eval_prompts=0"


@dataclass
class FiguresConfig:
    measure: list[str] = doc([], "figures to measure before the pages are rendered; all: every figure")


@dataclass(frozen=True)
class Figure:
    """How a figure is measured. `{out}` in a command stands for an empty directory."""

    commands: tuple[str, ...]
    read: Callable[[Path, str], dict[str, Any]]
    """Makes the result from the directory and the output of the last command."""
    env: dict[str, str] = field(default_factory=dict)


def report(name: str, baseline: str = "") -> Callable[[Path, str], dict[str, Any]]:
    """The speedups and rewards of the run `name`, against another one if wanted, and what the last command printed."""

    def read(out: Path, printed: str) -> dict[str, Any]:
        summary = write_report(out / name, out / baseline if baseline else None).summary
        kept = ("measured", "paired", "reward", "eval", "step_s", "steps", "reuse")
        return {key: summary.get(key) for key in kept} | {"printed": printed.splitlines()}

    return read


def json_file(out: Path, printed: str) -> dict[str, Any]:
    """What the last command wrote to result.json, without its options, which the command has."""
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return {key: value for key, value in result.items() if key not in ("options", "words", "machine", "repeats")}


RIVALS = "benchmarks.rivals config=grpo_math_vllm rows=32 out={out}/result.json"
COMPILED = ONE_THREAD | {"TORCH_COMPILE_DISABLE": "0"}
AHEAD = "benchmarks.ahead out={out}/result.json"
TWINS = "benchmarks.twins out={out}/result.json"
REAL = "benchmarks.real sizes=[8,32] rollout.max_new_tokens=64 trainer.learning_rate=1e-6 out={out}/result.json"
FILL = "benchmarks.fill out={out}/result.json"
REAL_FILL = (
    "config=grpo_smollm2 trainer.learning_rate=1e-6 trainer.epochs=3 dataset.train_size=6 trainer.prompts_per_step=1 "
    "rollout.temperature=1 rollout.max_new_tokens=64 fills=[0,64] reward.functions=[benchmarks.brevity:brevity]"
)
SMALL = "trainer.prompts_per_step=2 dataset.train_size=32"
LONG = "rollout.max_new_tokens=220 rollout.tokens_per_pass=4096"
FIGURES = {
    "train": Figure(("specrl.train config=grpo_math name=train output_dir={out}",), report("train")),
    "ppo": Figure(("specrl.train config=ppo_math name=ppo output_dir={out}",), report("ppo")),
    "whole-runs": Figure(
        (
            f"specrl.train config=grpo_math name=plain output_dir={{out}} {NO_EVALUATION} "
            "rollout.acceptance=off rollout.measure_every=0",
            f"specrl.train config=grpo_math name=exact output_dir={{out}} {NO_EVALUATION} rollout.measure_every=0",
        ),
        report("exact", "plain"),
    ),
    "bench": Figure((f"benchmarks.paired rows=64 repeats=8 {LONG} out={{out}}/result.json",), json_file, ONE_THREAD),
    "ablation": Figure(
        (
            "specrl.drafter kind=head out={out}/head",
            f"benchmarks.ablation rows=256 repeats=3 few=true {LONG} drafters=[{{out}}/head] out={{out}}/result.json",
        ),
        json_file,
        ONE_THREAD,
    ),
    "vllm": Figure((f"{RIVALS} repeats=9 rollout.vllm.compile=on",), json_file, COMPILED),
    "vllm-old-text": Figure(
        (
            f"specrl.train config=grpo_math name=run output_dir={{out}} {NO_EVALUATION} trainer.save_every=112 "
            "rollout.measure_every=0",
            f"{RIVALS} repeats=9 rollout.vllm.compile=on model={{out}}/run/model "
            "old_model={out}/run/checkpoints/checkpoint-112",
        ),
        json_file,
        COMPILED,
    ),
    "ahead": Figure((AHEAD,), json_file),
    "ahead-small": Figure((f"{AHEAD} {SMALL}",), json_file),
    "ahead-fresh": Figure((f"{AHEAD} case=fresh trainer.epochs=1 {SMALL}",), json_file),
    "fill": Figure((f"{FILL} trainer.epochs=3",), json_file, ONE_THREAD),
    "fill-7b": Figure((f"{FILL} gpu=7B trainer.epochs=2 fills=[0,150]",), json_file, ONE_THREAD),
    "smollm2-fill": Figure((f"{FILL} {REAL_FILL}",), json_file, ONE_THREAD),
    "trl-ahead": Figure(("benchmarks.trl_ahead prompts=2 steps=12 out={out}/result.json",), json_file, ONE_THREAD),
    "evaluations": Figure(("benchmarks.evaluations out={out}/result.json",), json_file, ONE_THREAD),
    "turns": Figure(("benchmarks.turns out={out}/result.json",), json_file, ONE_THREAD),
    "real": Figure((REAL,), json_file),
    "real-gpu": Figure((f"{REAL} gpu=1.5B repeats=1 lenience=[]",), json_file),
    "real-gpu-7b": Figure((f"{REAL} gpu=7B repeats=1 lenience=[]",), json_file),
    "real-run": Figure(
        (
            f"specrl.train config=grpo_smollm2 name=run output_dir={{out}} {NO_EVALUATION} trainer.max_steps=16 "
            "trainer.save_every=8 trainer.learning_rate=1e-6 rollout.measure_every=0 report.plots=false",
            "benchmarks.real model={out}/run/model old_model={out}/run/checkpoints/checkpoint-8 rows=32 "
            "rollout.max_new_tokens=64 temperatures=[0.6,1.0] lenience=[] out={out}/result.json",
        ),
        json_file,
    ),
    "twins": Figure((TWINS,), json_file, ONE_THREAD),
    "twins-vllm": Figure(
        (f"{TWINS} rollout.engine=vllm 'arms=[the same again,beta 0.02,lr x 0.5,ppo]'",), json_file, ONE_THREAD
    ),
}


def main(config: FiguresConfig) -> int:
    names = list(FIGURES) if config.measure == ["all"] else config.measure
    if unknown := [name for name in names if name not in FIGURES]:
        raise ConfigError(f"measure=[{unknown[0]}]: no such figure. Try one of {', '.join(FIGURES)}, or all.")
    if names:
        commit = clean_commit()
        for name in names:
            print(f"measuring {name}", flush=True)
            path = RESULTS / f"{name}.json"
            path.write_text(json.dumps(measure(FIGURES[name], commit), indent=1) + "\n", encoding="utf-8")
    for name in PAGES:
        page = ROOT / name
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
    picture.draw()
    picture.draw_kinds()
    return 0


def clean_commit() -> str:
    """The short hash of the commit.

    Raises:
        ConfigError: files other than results and pages differ from it, so the figures could not be repeated.
    """
    changed = _git("status", "--porcelain", "--untracked-files=no").splitlines()
    allowed = (*PAGES, "benchmarks/results/", "docs/images/")
    if other := [line[3:] for line in changed if not line[3:].startswith(allowed)]:
        raise ConfigError(f"{other[0]} differs from the commit, so its figures cannot be repeated. Commit it first.")
    return _git("rev-parse", "--short", "HEAD").strip()


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def measure(figure: Figure, commit: str) -> dict[str, Any]:
    """Runs the commands of a figure; the content of its file.

    Raises:
        ConfigError: a command failed.
    """
    printed = ""
    with tempfile.TemporaryDirectory(prefix="specrl-figure-") as out:
        for command in figure.commands:
            words = shlex.split(command.format(out=out))
            done = subprocess.run(
                [sys.executable, "-m", *words], cwd=ROOT, env=os.environ | figure.env, capture_output=True, text=True
            )
            if done.returncode:
                raise ConfigError(f"python -m {command} failed with code {done.returncode}: {done.stderr[-2000:]}")
            printed = done.stdout
        result = figure.read(Path(out), printed.replace(out, "outputs"))
    shown = [
        " ".join([*(f"{key}={value}" for key, value in figure.env.items()), f"python -m {command}"])
        for command in figure.commands
    ]
    return {
        "commands": [text.replace("{out}", "OUT") for text in shown],
        "commit": commit,
        "machine": machine(),
        "result": result,
    }


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=FiguresConfig))
