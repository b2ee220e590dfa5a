"""A training run that is killed and starved at random moments, against the same run undisturbed.

    python benchmarks/soak.py out=DIR steps=400 seed=0 [config=ppo_math key=value ...]

Three runs of `python -m specrl.train`. `quiet` is undisturbed. `control` has a reward that leaks (faults/rewards.py),
which the bounds of soak_checks.py must detect. `disturbed` has a wall clock that jumps by hours and years
(faults/sitecustomize.py). From time to time one of FAULTS strikes; after each death the run resumes with options of
LEGAL changed, sometimes after one of ILLEGAL was refused. It must end with the weights of the quiet run, byte for byte,
and with the same record of every step. OUT gets events.log, samples.json, summary.json and
the runs. Exit code 1: a violation.
"""

from __future__ import annotations

import hashlib
import json
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path

from soak_checks import Sample, disagreements, excesses, grown, leaks
from soak_life import Life, command, environment, size_mb

from specrl.config import load as cli
from specrl.config import options
from specrl.config.load import RUN_ERROR, TERMINATED, USAGE_ERROR
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.results.records import METRICS_FILE, read_records
from specrl.rollout.sections import doc

SMALL = {
    "config": "grpo_math",
    "data": "arithmetic:easy",
    "dataset.train_size": "16",
    "rollout.group_size": "4",
    "rollout.max_new_tokens": "24",
    "rollout.replay": "0.5",
    "rollout.measure_every": "16",
    "cluster.task_timeout_s": "20",
    "reward.functions": "[rewards:digits]",
    "trainer.prompts_per_step": "1",
    "trainer.beta": "0.02",
    "trainer.lr_schedule": "constant",
    "trainer.save_every": "5",
    "trainer.eval_prompts": "0",
    "report.plots": "false",
}
"""Options unless the command line has others: the embedded policy, four short rows a step."""
LEGAL = {
    "rollout.acceptance": ("exact", "off"),
    "rollout.draft_tokens": ("0", "4"),
    "rollout.cache.max_mb": ("1", "512"),
    "rollout.measure_every": ("0", "7"),
    "rollout.rows_per_batch": ("3", "256"),
    "rollout.sources": ("[prefix]", "[position,group]"),
    "rollout.tokens_per_pass": ("300", "4096"),
    "trainer.save_every": ("3", "8"),
}
ILLEGAL = {"seed": "99", "trainer.learning_rate": "0.5", "rollout.temperature": "0.7", "rollout.group_size": "2"}
CONTROL = {"reward.functions": "[rewards:leaky]", "trainer.save_every": "2"}
CONTROL_STEPS = 24


@dataclass
class SoakConfig(Config):
    out: str = doc("", "directory of the runs, events.log and summary.json")
    steps: int = doc(400, "optimiser steps of the run")
    every: int = doc(10, "mean number of steps between two faults")
    faults: str = doc("", "names of FAULTS with commas; empty takes all that the run can have")


# Faults: each strikes a process and returns the expected exit code, or None if the run must go on ---------------------


def kill(life: Life) -> int:
    life.process.kill()
    return -signal.SIGKILL


def terminate(life: Life) -> int:
    life.process.terminate()
    return TERMINATED


def disk_full(life: Life) -> int:
    """Weights can no longer be written, as no file may be half as large: the run stops at its next checkpoint."""
    largest = max(path.stat().st_size for path in (life.run / "checkpoints").rglob("*.safetensors"))
    life.process.rlimit(resource.RLIMIT_FSIZE, (largest // 2, resource.RLIM_INFINITY))
    return RUN_ERROR


def cache_full(life: Life) -> None:
    """Trajectories can no longer be written: the run goes on, with checkpoints that lack them."""
    life.sign.touch()
    life.reaches(life.step + 1 + int(life.words["trainer.save_every"]))
    life.sign.unlink()


def reward_worker_killed(life: Life) -> None:
    life.worker("specrl.reward.worker").kill()


def rollout_worker_killed(life: Life) -> None:
    life.worker("RolloutWorker").kill()


def rollout_worker_stopped(life: Life) -> None:
    life.worker("RolloutWorker").suspend()


FAULTS: dict[str, Callable[[Life], int | None]] = {
    fault.__name__: fault
    for fault in (
        kill,
        terminate,
        disk_full,
        cache_full,
        reward_worker_killed,
        rollout_worker_killed,
        rollout_worker_stopped,
    )
}


class Soak:
    """The three runs and their violations."""

    def __init__(self, config: SoakConfig, words: dict[str, str]):
        self.out, self.steps, self.every = Path(config.out), config.steps, config.every
        self.words = words | {"output_dir": config.out, "trainer.max_steps": str(config.steps)}
        self.words.setdefault("trainer.epochs", str(config.steps))  # max_steps ends the run
        usable = [name for name in FAULTS if config.cluster.num_workers or not name.startswith("rollout_")]
        self.faults = config.faults.split(",") if config.faults else usable
        self.rng, self.began = random.Random(config.seed), time.monotonic()
        self.struck: Counter[str] = Counter()
        self.violations: list[str] = []

    def note(self, text: str) -> None:
        line = f"{time.monotonic() - self.began:7.1f} s  {text}"
        print(line, flush=True)
        with (self.out / "events.log").open("a") as log:
            log.write(line + "\n")

    def check(self, violations: Iterable[str]) -> None:
        for text in violations:
            self.violations.append(text)
            self.note(f"VIOLATION: {text}")

    def undisturbed(self, name: str, **changes: str) -> Life:
        self.note(name)
        life = Life(self.words | {"name": name} | changes, hostile=False)
        self.check(life.end(0))
        return life

    def disturbed(self) -> list[Life]:
        """The run with faults: all its processes."""
        self.note("disturbed")
        lives, deck = [self.born({})], []
        while True:
            life, deck = lives[-1], deck or self.rng.sample(self.faults, len(self.faults))
            gap = round(self.rng.uniform(0.2, 1.8) * self.every)
            target = max(life.step, int(self.words["trainer.save_every"])) + gap  # not before there is a checkpoint
            if target > self.steps - 3 or not life.reaches(target):
                break
            time.sleep(self.rng.random())
            name, step = deck.pop(), life.step
            due = FAULTS[name](life)
            self.struck[name] += 1
            self.note(f"step {step}: {name}")
            if due is not None:
                self.check(life.end(due))
                lives.append(self.born(self.changes(life)))
        self.check(life.end(0))
        return lives

    def born(self, changes: dict[str, str]) -> Life:
        return Life(self.words | {"name": "disturbed", "resume": "auto"} | changes, hostile=True)

    def changes(self, before: Life) -> dict[str, str]:
        """Other options for the next process; sometimes one that must not change is tried first."""
        if not self.struck["illegal_change"] or self.rng.random() < 0.2:
            self.refused(before)
        chosen = {key: self.rng.choice(LEGAL[key]) for key in self.rng.sample(list(LEGAL), 3)}
        self.note(f"goes on with {chosen}")
        return chosen

    def refused(self, before: Life) -> None:
        key = self.rng.choice(list(ILLEGAL))
        words = command(before.words | {key: ILLEGAL[key]})
        tried = subprocess.run(words, env=environment(), capture_output=True, text=True)
        if tried.returncode != USAGE_ERROR or f"other settings than {before.run} began with: {key}" not in tried.stderr:
            self.check([f"{key}={ILLEGAL[key]} was not refused: {tried.returncode} {tried.stderr[-500:]}"])
        self.struck["illegal_change"] += 1
        self.note(f"{key}={ILLEGAL[key]} is refused")

    def run(self) -> int:
        quiet = self.undisturbed("quiet")
        self.check(leaks(quiet.samples))
        control = self.undisturbed("control", **CONTROL, **{"trainer.max_steps": str(CONTROL_STEPS)})
        if len(flagged := leaks(control.samples)) < 2:
            self.check([f"the planted leak of memory and processes was not found: {flagged}"])
        lives = self.disturbed()
        self.compare(quiet.run, lives[-1].run)
        samples = [sample for life in lives for sample in life.samples]
        # besides the checkpoints kept: one being written, and one whose writing was cut short
        kept = int(self.words.get("trainer.keep_checkpoints", 2)) + 2
        disk_mb = kept * quiet.samples[-1].checkpoint_mb + size_mb(quiet.run) - size_mb(quiet.run / "checkpoints") + 1
        self.check(excesses(samples, quiet.samples, disk_mb))
        series = {"quiet": quiet.samples, "disturbed": samples}
        text = json.dumps({name: [vars(sample) for sample in samples] for name, samples in series.items()})
        (self.out / "samples.json").write_text(text)
        summary = {
            "command": " ".join(["python", *sys.argv]),
            "steps": self.steps,
            "seconds": round(time.monotonic() - self.began),
            "processes": len(lives),
            "struck": self.struck,
            "violations": self.violations,
            "quiet: growth after warm-up and the most allowed": grown(quiet.samples),
            "quiet: peak": vars(peak(quiet.samples)),
            "disturbed: peak": vars(peak(samples)),
            "disk_mb allowed": disk_mb,
            "control: found": flagged,
        }
        (self.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        self.note(f"{len(self.violations)} violations; {self.out / 'summary.json'}")
        return int(bool(self.violations))

    def compare(self, quiet: Path, disturbed: Path) -> None:
        """Compares weights and records, and checks that the faults had an effect."""
        due, got = (records(run) for run in (quiet, disturbed))
        self.check(disagreements(due, got))
        if not all(len({record[name] for record in due}) > self.steps / 4 for name in ("loss", "grad_norm")):
            self.check(["the quiet run hardly trains, so that equal weights say little"])
        if len({weights(run) for run in (quiet, disturbed)}) > 1:
            self.check(["the weights differ"])
        times = [record["time"] for record in got]
        if not any(b < a for a, b in pairwise(times)) or max(times) - min(times) < 86_400:
            self.check(["the clock did not jump"])
        if self.struck["cache_full"] and "without saving the cache" not in disturbed.with_suffix(".log").read_text():
            self.check(["no warning of a cache that cannot be saved"])
        self.check(f"{name} never struck; more steps are needed" for name in self.faults if not self.struck[name])


def records(run: Path) -> list[dict]:
    lines = read_records(run / METRICS_FILE)[0] if (run / METRICS_FILE).exists() else []
    return [record for record in lines if "loss" in record]


def weights(run: Path) -> str:
    file = run / "model" / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else f"none in {run}"


def peak(samples: Iterable[Sample]) -> Sample:
    return Sample(*map(max, zip(*map(astuple, samples), strict=True)))


def main(argv: list[str]) -> int:
    words = SMALL | options.parse(argv)
    soak_words = {key: words.pop(key) for key in ("out", "steps", "every", "faults") if key in words}

    def begin(config: SoakConfig) -> int:
        if Path(config.out).exists():
            raise ConfigError(f"out={config.out} exists already. Give another directory, or remove it.")
        if unknown := [name for name in config.faults.split(",") if name and name not in FAULTS]:
            raise ConfigError(f"faults={config.faults}: {unknown[0]!r} is none of {', '.join(FAULTS)}.")
        Path(config.out).mkdir(parents=True)
        return Soak(config, words).run()

    return cli.run(begin, [f"{key}={value}" for key, value in (words | soak_words).items()], SoakConfig)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
