"""Reads the metrics, the configuration and the machine of a run. `specrl/run/monitor.py` writes the metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
"""Keys and types that a machine's record must have to be compared."""
EVALUATION_COST = (
    *("eval/max_length", "eval/passes_per_row", "eval/passes_max", "eval/hit_rate", "eval/reused_ratio"),
    *("eval/unchanged_ratio", "eval/gen_s", "eval/lookup_s", "eval/store_s"),
)
"""Metrics of an evaluation that say nothing about the policy."""
OF_STEPS = {"reward", "timing_s/gen", "timing_s/step"}
"""Metrics that make a record one of an optimiser step. Between two rollouts, steps have their time only."""


@dataclass(frozen=True)
class RunRecords:
    """The records of one run."""

    path: Path
    steps: list[dict]
    """The last record of each optimiser step, in order; at least one."""
    evals: list[dict]
    """The last record of each evaluation, in order."""
    last: dict
    """The last record that has an epoch."""
    unreadable: int
    """Number of lines that could not be read."""

    @cached_property
    def config(self) -> Config | None:
        """The run's configuration; None if config.yaml is missing or unreadable."""
        try:
            return load_saved(self.path)
        except ConfigError:
            return None

    @cached_property
    def machine(self) -> dict | None:
        """CPU, GPUs and versions; None if the run has no readable record of them."""
        try:
            kept = read_json((self.path / ENVIRONMENT_FILE).read_bytes())
        except (OSError, ValueError):
            return None
        sound = isinstance(kept, dict) and kept.keys() >= MACHINE.keys()
        return kept if sound and all(isinstance(kept[key], kind) for key, kind in MACHINE.items()) else None

    @property
    def finished(self) -> bool | None:
        """Whether the run reached its last step; None if its configuration is unknown."""
        if self.config is None:
            return None
        if most := self.config.trainer.max_steps:
            return self.last["step"] >= most
        return epoch(self.last) > self.config.trainer.epochs - 1e-6


def load_run(name: str | Path) -> RunRecords:
    """Reads the metrics of a run, which `find_run` looks up.

    Raises:
        ConfigError: the run does not exist or has no metrics.
    """
    path = find_run(name)
    records, unreadable = read_records(path / METRICS_FILE) if (path / METRICS_FILE).exists() else ([], 0)
    evals = {record["step"]: record for record in records if any(key.startswith("eval/") for key in record)}
    steps = {record["step"]: record for record in records if OF_STEPS & record.keys()}
    if not steps:
        raise ConfigError(
            f"No metrics in {path}: {METRICS_FILE} has no step yet. A run writes it after its first step."
        )
    ordered = [steps[at] for at in sorted(steps)]
    last = max((record for record in records if "epoch" in record), key=lambda r: r["step"], default=ordered[-1])
    return RunRecords(path, ordered, [evals[at] for at in sorted(evals)], last, unreadable)


def find_run(name: str | Path) -> Path:
    """The directory of a run; `name` is a path or the name of a run in ./outputs.

    Raises:
        ConfigError: there is no such directory; the message suggests the run with the most similar name.
    """
    path = next((place for place in (Path(name), Path("outputs") / name) if place.is_dir()), None)
    if path is None:
        folders = (Path(name).parent, Path("outputs"))
        known = {file.parent.name: file.parent for folder in folders for file in folder.glob(f"*/{METRICS_FILE}")}
        near = get_close_matches(Path(name).name, known, 1, cutoff=0.3)
        raise ConfigError(f"No run at {name}." + (f" Did you mean {known[near[0]]}?" if near else " Give run=DIR."))
    return path


def read_records(path: str | Path) -> tuple[list[dict], int]:
    """The records of a metrics.jsonl in file order, and the number of unreadable lines, such as one cut by a crash."""
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
    """Progress in epochs after the step, so that epoch 1 ends at 1.0; 0 if not recorded."""
    return number(record, "epoch") or 0.0


def number(record: Mapping[str, Any], key: str) -> float | None:
    """The finite number at `key`; None if it is absent, null, NaN, infinite or not a number."""
    value = jsonable(record.get(key))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def jsonable(value: Any) -> Any:
    """Converts `value` to JSON types: tensors to numbers or lists, NaN and infinities to None, all else to text."""
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
    """A number as text, without a minus sign for zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def counted(count: float, noun: str) -> str:
    """A number with its noun in singular or plural: `1 step`, `3 steps`."""
    return f"{count:.0f} {noun}{'s' * (count != 1)}"


def total(steps: Iterable[Mapping[str, Any]], key: str) -> float:
    return sum(number(record, key) or 0.0 for record in steps)


def mean(steps: Iterable[Mapping[str, Any]], key: str) -> float | None:
    values = [value for record in steps if (value := number(record, key)) is not None]
    return fmean(values) if values else None
