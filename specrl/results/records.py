"""Reading back what a run left: its metrics, its configuration and its machine. Writing them is monitor.py's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from specrl.config.load import load_saved
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.rollout.durable import read_json
from specrl.run.machine import ENVIRONMENT_FILE

METRICS_FILE = "metrics.jsonl"
MACHINE = {"cpu": str, "cores": int | None, "gpus": list, "versions": dict}
"""What a record of a machine has to hold to be compared."""
RUN_WORDS = ("path", "dir", "directory", "run_dir", "name")
"""Words for which the option `run` is meant."""


@dataclass(frozen=True)
class RunRecords:
    """The records of one run."""

    path: Path
    steps: list[dict]
    """The last record of each optimiser step, in order; at least one."""
    evals: list[dict]
    """The last record of each evaluation, in order."""
    last: dict
    """The record of the last optimiser step, which may be one between two rollouts."""
    unreadable: int
    """Lines that could not be read."""

    @cached_property
    def config(self) -> Config | None:
        """None when config.yaml is missing or unreadable."""
        try:
            return load_saved(self.path)
        except ConfigError:
            return None

    @cached_property
    def machine(self) -> dict | None:
        """CPU, GPUs and versions, None when the run kept no record of them that can be read."""
        try:
            kept = read_json((self.path / ENVIRONMENT_FILE).read_bytes())
        except (OSError, ValueError):
            return None
        sound = isinstance(kept, dict) and kept.keys() >= MACHINE.keys()
        return kept if sound and all(isinstance(kept[key], kind) for key, kind in MACHINE.items()) else None

    @property
    def finished(self) -> bool | None:
        """Whether the run came to its end, None where its configuration is unknown."""
        if self.config is None:
            return None
        if most := self.config.trainer.max_steps:
            return self.last["step"] >= most
        return epoch(self.last) > self.config.trainer.epochs - 1e-6


def load_run(name: str | Path) -> RunRecords:
    """Reads back the metrics of a run that `find_run` finds.

    Raises:
        ConfigError: no such run, or a run without metrics.
    """
    path = find_run(name)
    records, unreadable = read_records(path / METRICS_FILE) if (path / METRICS_FILE).exists() else ([], 0)
    evals = {record["step"]: record for record in records if any(key.startswith("eval/") for key in record)}
    steps = {record["step"]: record for record in records if "reward" in record or "timing_s/gen" in record}
    if not steps:
        raise ConfigError(
            f"No metrics in {path}: {METRICS_FILE} has no step yet. A run writes it after its first step."
        )
    ordered = [steps[at] for at in sorted(steps)]
    last = max((record for record in records if "epoch" in record), key=lambda r: r["step"], default=ordered[-1])
    return RunRecords(path, ordered, [evals[at] for at in sorted(evals)], last, unreadable)


def find_run(name: str | Path) -> Path:
    """A run's directory: the one given, or the run of that name in ./outputs.

    Raises:
        ConfigError: there is no such directory; the message names the nearest run.
    """
    path = next((place for place in (Path(name), Path("outputs") / name) if place.is_dir()), None)
    if path is None:
        folders = (Path(name).parent, Path("outputs"))
        known = {file.parent.name: file.parent for folder in folders for file in folder.glob(f"*/{METRICS_FILE}")}
        near = get_close_matches(Path(name).name, known, 1, cutoff=0.3)
        raise ConfigError(f"No run at {name}." + (f" Did you mean {known[near[0]]}?" if near else " Give run=DIR."))
    return path


def run_option(help: str) -> Any:
    """The option `run` of a command, a field of its dataclass."""
    return field(default="", metadata={"help": help, "also": RUN_WORDS})


def read_records(path: str | Path) -> tuple[list[dict], int]:
    """The records of a metrics.jsonl in file order, and how many lines were unreadable, such as one torn by a crash."""
    records, bad = [], 0
    with Path(path).open("rb") as file:
        for line in file:
            try:
                record = read_json(line)
            except ValueError:
                record = None
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
            elif line.strip():
                bad += 1
    return records, bad


def epoch(record: Mapping[str, Any]) -> float:
    """Progress in epochs after the step, so 1.0 is the last step of epoch 1; 0 when it was not recorded."""
    return number(record, "epoch") or 0.0


def number(record: Mapping[str, Any], key: str) -> float | None:
    """The finite number at `key`, None when it is absent, null, NaN, infinite or no number."""
    value = jsonable(record.get(key))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def jsonable(value: Any) -> Any:
    """`value` with JSON types only: tensors as numbers or lists, NaN and infinities as None, the rest as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if getattr(value, "size", None) == 1 or getattr(value, "ndim", None) == 0:
        return jsonable(value.item())
    return jsonable(value.tolist()) if hasattr(value, "tolist") else str(value)


def to_json(record: Mapping[str, Any]) -> str:
    """One line of strict JSON."""
    return json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False)


def text(value: float, digits: int) -> str:
    """A number as text, never -0."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def counted(count: float, noun: str) -> str:
    """A number with its noun: `1 step`, `3 steps`."""
    return f"{count:.0f} {noun}{'s' * (count != 1)}"


def total(steps: Iterable[Mapping[str, Any]], key: str) -> float:
    return sum(number(record, key) or 0.0 for record in steps)


def mean(steps: Iterable[Mapping[str, Any]], key: str) -> float | None:
    values = [value for record in steps if (value := number(record, key)) is not None]
    return fmean(values) if values else None
