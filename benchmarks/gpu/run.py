"""Runs phases one after the other, each in its own process, so that a failure or a hang loses only that phase.

The parent imports what all need and touches no GPU, so that its children, forked from it, start at once and each with a
GPU that no other has left in a bad state. A phase is an iterator of measurements. The phase's deadline
is checked before each, and the report is written after each; a measurement that raises loses only itself.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

GRACE = 20
"""Seconds after its deadline at which a phase is killed."""


class Absent(Exception):
    """The measurement is not possible here. The message says what is missing."""


class Step(NamedTuple):
    """One measurement."""

    name: str
    """The key of its figures in the phase's; a slash goes one level down."""
    measure: Callable[[], Any]
    needs: float = 0.0
    """Seconds that must be left for it to be begun."""


class Clock:
    """What is left of a deadline."""

    def __init__(self, seconds: float):
        self.seconds, self._end = seconds, time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


@dataclass(frozen=True)
class Phase:
    """A question. Args: steps: yields its measurements, given the context."""

    name: str
    steps: Callable[[Any], Iterator[Step]]
    deadline: float


class Report:
    """The figures so far, on disk as JSON, written atomically."""

    def __init__(self, path: Path, content: dict):
        self.path, self.content = path, content

    def save(self) -> None:
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.path)

    def load(self) -> None:
        self.content = json.loads(self.path.read_text(encoding="utf-8"))

    def note(self, phase: str, name: str, value: Any, seconds: float) -> None:
        """Writes down what a measurement result and how long it took."""
        entry = self.content["phases"][phase]
        entry["steps_s"][name] = round(seconds, 3)
        *parents, last = name.split("/")
        inner = entry["figures"]
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = value
        self.save()


def run(phases: Sequence[Phase], context: Callable[[Report], Any], report: Report, seconds: float) -> None:
    """Runs the phases within `seconds`; deadlines that add up to less, as those of few phases do, are stretched.

    Args: context: makes the context of a phase's steps, in its process.
    """
    total, fork = Clock(seconds), multiprocessing.get_context("fork")
    stretch = max(1.0, seconds / sum(phase.deadline for phase in phases))
    report.content["phases"] = {}
    for phase in phases:
        deadline = min(stretch * phase.deadline, total.left())
        entry = {"deadline_s": round(deadline, 1), "steps_s": {}, "figures": {}}
        report.content["phases"][phase.name] = entry
        if deadline <= 0:
            entry["stopped"] = f"not begun: all {seconds} s were spent"
            continue
        report.save()
        began = time.monotonic()
        child = fork.Process(target=_work, args=(phase, context, report, deadline))
        child.start()
        child.join(deadline + GRACE)
        report.load()
        entry = report.content["phases"][phase.name]
        if child.is_alive():
            entry["error"] = f"killed {GRACE} s after its deadline of {deadline:.1f} s"
        elif child.exitcode:
            entry["error"] = f"its process died with exit code {child.exitcode}"
        with suppress(ProcessLookupError):  # with its children, which may outlive it
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
        entry["seconds"] = round(time.monotonic() - began, 1)
        report.content["seconds"] = round(seconds - total.left(), 1)
        report.save()


def _work(phase: Phase, context: Callable[[Report], Any], report: Report, deadline: float) -> None:
    """A phase, in its process."""
    os.setsid()
    clock, entry = Clock(deadline), report.content["phases"][phase.name]
    try:
        for step in phase.steps(context(report)):
            if clock.left() <= 0:
                entry["stopped"] = f"{step.name} and what follows, at the deadline of {deadline:.1f} s"
                break
            began = time.monotonic()
            value = _measured(step, clock)
            report.note(phase.name, step.name, value, time.monotonic() - began)
            print(f"{phase.name}: {step.name}: {json.dumps(value)}"[:160], flush=True)
    except Exception as error:
        entry["error"] = said(error)
    report.save()


def _measured(step: Step, clock: Clock) -> Any:
    if clock.left() < step.needs:
        return {"skipped": f"needs {step.needs:.0f} s, {clock.left():.0f} s were left"}
    try:
        return step.measure()
    except Absent as reason:
        return {"skipped": str(reason)}
    except Exception as error:
        return {"error": said(error)}


def installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def said(error: Exception) -> str:
    """An error in a few words."""
    return f"{type(error).__name__}: {error}"[:600]


def faults(content: dict) -> list[str]:
    """What went wrong in a report's phases, as lines."""
    result = []
    for name, entry in content["phases"].items():
        result += [f"{name}: {entry[key]}" for key in ("error", "stopped") if key in entry]
        result += [f"{name}: {line}" for line in _errors(entry["figures"], "")]
    return result


def _errors(result: Any, path: str) -> Iterator[str]:
    if isinstance(result, dict):
        if isinstance(result.get("error"), str):
            yield f"{path}{result['error']}"
        for key, value in result.items():
            yield from _errors(value, f"{path}{key}: ")
