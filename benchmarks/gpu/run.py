"""Runs phases one after the other, each in a process of its own: what breaks or hangs there is lost alone.

The parent imports what all need and touches no GPU, so that its children, forked from it, start at once and each with a
GPU that no other has left in a bad state. A phase is an iterator of measurements. Before each the phase's deadline is
looked at, behind each the report is written; a measurement that raises costs itself alone.
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
"""Seconds behind its deadline after which a phase is killed."""


class Absent(Exception):
    """What is to be measured does not exist here. The message says what is lacking."""


class Step(NamedTuple):
    """One measurement."""

    name: str
    """Where its figures stand in the phase's; a slash goes one level down."""
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
    """A question. Args: steps: given what `run` was given, yields its measurements."""

    name: str
    steps: Callable[[Any], Iterator[Step]]
    deadline: float


class Report:
    """What was found so far, on disk as JSON; written whole or not at all."""

    def __init__(self, path: Path, content: dict):
        self.path, self.content = path, content

    def save(self) -> None:
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.path)

    def load(self) -> None:
        self.content = json.loads(self.path.read_text(encoding="utf-8"))

    def note(self, phase: str, name: str, value: Any, seconds: float) -> None:
        """Writes down what a measurement found and how long it took."""
        place = self.content["phases"][phase]
        place["steps_s"][name] = round(seconds, 3)
        *parents, last = name.split("/")
        inner = place["found"]
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = value
        self.save()


def run(phases: Sequence[Phase], given: Callable[[Report], Any], report: Report, seconds: float) -> None:
    """Runs the phases within `seconds`; deadlines that add up to less, as those of few phases do, are stretched.

    Args: given: makes what a phase's steps are given, in its process.
    """
    total, fork = Clock(seconds), multiprocessing.get_context("fork")
    stretch = max(1.0, seconds / sum(phase.deadline for phase in phases))
    report.content["phases"] = {}
    for phase in phases:
        deadline = min(stretch * phase.deadline, total.left())
        place = {"deadline_s": round(deadline, 1), "steps_s": {}, "found": {}}
        report.content["phases"][phase.name] = place
        if deadline <= 0:
            place["stopped"] = f"not begun: all {seconds} s were spent"
            continue
        report.save()
        began = time.monotonic()
        child = fork.Process(target=_work, args=(phase, given, report, deadline))
        child.start()
        child.join(deadline + GRACE)
        report.load()
        place = report.content["phases"][phase.name]
        if child.is_alive():
            place["error"] = f"killed {GRACE} s behind its deadline of {deadline:.1f} s"
        elif child.exitcode:
            place["error"] = f"its process died with exit code {child.exitcode}"
        with suppress(ProcessLookupError):  # its own children too, and those that outlive it
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
        place["seconds"] = round(time.monotonic() - began, 1)
        report.content["seconds"] = round(seconds - total.left(), 1)
        report.save()


def _work(phase: Phase, given: Callable[[Report], Any], report: Report, deadline: float) -> None:
    """A phase, in its process."""
    os.setsid()
    clock, place = Clock(deadline), report.content["phases"][phase.name]
    try:
        for step in phase.steps(given(report)):
            if clock.left() <= 0:
                place["stopped"] = f"{step.name} and what follows, at the deadline of {deadline:.1f} s"
                break
            began = time.monotonic()
            value = _measured(step, clock)
            report.note(phase.name, step.name, value, time.monotonic() - began)
            print(f"{phase.name}: {step.name}: {json.dumps(value)}"[:160], flush=True)
    except Exception as error:
        place["error"] = said(error)
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
    found = []
    for name, place in content["phases"].items():
        found += [f"{name}: {place[key]}" for key in ("error", "stopped") if key in place]
        found += [f"{name}: {line}" for line in _errors(place["found"], "")]
    return found


def _errors(found: Any, path: str) -> Iterator[str]:
    if isinstance(found, dict):
        if isinstance(found.get("error"), str):
            yield f"{path}{found['error']}"
        for key, value in found.items():
            yield from _errors(value, f"{path}{key}: ")
