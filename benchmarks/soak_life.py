"""One process of a soaked run, watched from outside."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from soak_checks import Sample

from specrl.results.records import METRICS_FILE
from specrl.trainers.checkpoint import completed

HOOKS = Path(__file__).parent / "faults"
SAMPLE_S = 1.0  # longest time between two samples; every step has one too
PATIENCE_S = 300.0  # a run without a step for so long has hung


class Life:
    """One process of `python -m specrl.train`, watched from its start to its end, whatever ends it."""

    def __init__(self, words: dict[str, str], hostile: bool):
        self.words, self.samples, self.run = words, [], Path(words["output_dir"]) / words["name"]
        self.log, self.sign = self.run.with_suffix(".log"), self.run.with_suffix(".disk-full")
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"  # in the environment of every process of this life
        env = environment() | {"SOAK_LIFE": self.mark}
        env |= {"SOAK_DISK_FULL": str(self.sign)} if hostile else {}
        self.resumed_from = self.step
        with self.log.open("a") as log:
            self.process = psutil.Popen(command(words), env=env, stdout=log, stderr=log)

    @property
    def step(self) -> int:
        """The last step on record."""
        with suppress(FileNotFoundError), (self.run / METRICS_FILE).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 20_000))
            for line in reversed(file.read().splitlines()):
                with suppress(ValueError):
                    return json.loads(line)["step"]
        return 0

    def reaches(self, step: int) -> bool:
        """Waits until `step` is done, sampling; False when the process ended before.

        Sampling begins with the first step of this process, because transformers loads weights in up to four threads
        that end before training starts.
        """
        last, changed, looked = -1, time.monotonic(), 0.0
        while self.process.poll() is None:
            now, current = time.monotonic(), self.step
            if current > self.resumed_from and (current != last or now - looked > SAMPLE_S):
                looked = now
                with suppress(psutil.Error, FileNotFoundError):
                    self.samples.append(self.look())
            if current != last:
                last, changed = current, now
            if last >= step:
                return True
            if now - changed > PATIENCE_S:
                self.process.kill()
            time.sleep(0.05)
        return False

    def look(self) -> Sample:
        saved = completed(self.run / "checkpoints")
        return Sample(
            self.step,
            self.process.memory_info().rss / 2**20,
            sum(worker.memory_info().rss for worker in self.workers("specrl.reward.worker", "RolloutWorker")) / 2**20,
            self.process.num_fds(),
            self.process.num_threads(),
            1 + len(self.process.children(recursive=True)),
            size_mb(self.run),
            size_mb(saved[-1].path) if saved else 0.0,
        )

    def workers(self, *kinds: str) -> list[psutil.Process]:
        """The running children of these kinds."""
        children = {child: title(child) for child in self.process.children(recursive=True)}
        return [child for child, name in children.items() if any(kind in name for kind in kinds)]

    def worker(self, kind: str) -> psutil.Process:
        """A running child of this kind; one that is just being replaced is waited for."""
        deadline = time.monotonic() + PATIENCE_S
        while not (workers := self.workers(kind)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {kind} among the children for {PATIENCE_S:g} s")
            time.sleep(0.1)
        return workers[0]

    def end(self, due: int) -> Iterator[str]:
        """Waits for the end; yields violations: an exit code other than `due`, or processes that are still running."""
        self.reaches(sys.maxsize)
        if (code := self.process.wait()) != due:
            yield f"exit code {code} instead of {due} after step {self.step}: {self.log.read_text()[-1000:]}"
        deadline = time.monotonic() + 30
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        yield from (f"still running: {process}" for process in left)

    def left(self) -> list[str]:
        """Running processes of this life, by the mark in their environment."""
        running = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SOAK_LIFE") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    running.append(f"{process.pid} {title(process)[:80]}")
        return running


def environment() -> dict[str, str]:
    """In which a life finds its faults and its reward."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(HOOKS), os.environ.get("PYTHONPATH", "")])}


def command(words: dict[str, str]) -> list[str]:
    return [sys.executable, "-m", "specrl.train", *(f"{key}={value}" for key, value in words.items())]


def title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def size_mb(folder: Path) -> float:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # removed since it was listed
            total += path.lstat().st_size
    return total / 2**20
