"""Results of deterministic tools: a call that came before has its result at once."""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from specrl.rollout.durable import read_json, write_durably
from specrl.rollout.reduction import Metric, mean, seconds

log = logging.getLogger(__name__)

MAX_CHARS = 64 * 2**20
"""Of all results that are kept."""
LONGEST = 2**20
"""Characters of one result that is kept."""


@dataclass
class Result:
    """What a tool returned, as TRL shows it to the model, and the seconds that it took."""

    text: str
    seconds: float


class ToolResults:
    """Results of tools with `tool.deterministic = True`, by the tool's name and its arguments, within bounds.

    Such a tool is a function of its arguments. All other tools, and methods of environments, always run. A call that
    raises, whose arguments JSON cannot represent, or whose result is long or a list of content parts is not kept.

    Args: max_chars: of all kept results; the least recently used are dropped first.
    """

    def __init__(self, max_chars: int = MAX_CHARS):
        self._max_chars = max_chars
        self._results: OrderedDict[str, Result] = OrderedDict()
        self._chars = 0
        self._new: list[tuple[str, Result]] = []
        self.calls = 0
        """Of deterministic tools, since the last `take_metrics`."""
        self.hits = 0
        """Of `calls`, those whose result was kept."""
        self.saved_s = 0.0
        """Seconds that these had taken when they ran."""

    def __len__(self) -> int:
        return len(self._results)

    def wrap(self, tool: Callable) -> Callable:
        """The tool, with its results kept if it is declared deterministic; its schema stays the same."""
        if not is_deterministic(tool):
            return tool
        name = tool.__name__
        if inspect.iscoroutinefunction(tool):

            @wraps(tool)
            async def call_later(**arguments: Any) -> Any:
                key = _key(name, arguments)
                if (kept := self._find(key)) is not None:
                    return kept
                began = time.perf_counter()
                return self._keep(key, await tool(**arguments), time.perf_counter() - began)

            return call_later

        @wraps(tool)
        def call(**arguments: Any) -> Any:
            key = _key(name, arguments)
            if (kept := self._find(key)) is not None:
                return kept
            began = time.perf_counter()
            return self._keep(key, tool(**arguments), time.perf_counter() - began)

        return call

    def _find(self, key: str | None) -> str | None:
        self.calls += 1
        result = self._results.get(key) if key else None
        if key is None or result is None:
            return None
        self._results.move_to_end(key)
        self.hits += 1
        self.saved_s += result.seconds
        return result.text

    def _keep(self, key: str | None, value: Any, spent_s: float) -> Any:
        if key is None or isinstance(value, list) or len(text := str(value)) > LONGEST:
            return value
        result = Result(text, spent_s)
        self._add(key, result)
        self._new.append((key, result))
        return value

    def _add(self, key: str, result: Result) -> None:
        before = self._results.pop(key, None)
        self._chars += len(result.text) - (len(before.text) if before else 0)
        self._results[key] = result
        while self._chars > self._max_chars:
            _, dropped = self._results.popitem(last=False)
            self._chars -= len(dropped.text)

    def take_new(self) -> list[tuple[str, Result]]:
        """The results since the last call, for the other processes of a run."""
        new = self._new
        self._new = []
        return new

    def merge(self, results: Iterable[tuple[str, Result]]) -> None:
        """Adds results of other processes."""
        for key, result in results:
            self._add(key, result)

    def take_metrics(self) -> dict[str, Metric]:
        """The metrics of the calls since the last time; none where there were none."""
        if not self.calls:
            return {}
        metrics = {"tools/kept_ratio": mean(self.hits, self.calls), "tools/saved_s": seconds(self.saved_s)}
        self.calls = self.hits = 0
        self.saved_s = 0.0
        return metrics

    def save(self, path: Path) -> None:
        """Writes the results as JSON, whole or not at all."""
        rows = [(key, result.text, result.seconds) for key, result in [*self._results.items()]]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps(rows).encode())

    def load(self, path: Path) -> None:
        """Adds the results of a file that `save` wrote. A damaged one costs the time of its calls only."""
        try:
            rows = read_json(path.read_bytes())
            self.merge([(str(key), Result(str(text), float(spent_s))) for key, text, spent_s in rows])
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s holds no results of tools (%s), so their calls run again", path, error)


def is_deterministic(tool: Callable) -> bool:
    """Whether a tool declares that it is a function of its arguments."""
    return getattr(tool, "deterministic", False) is True


def _key(name: str, arguments: dict[str, Any]) -> str | None:
    try:
        return json.dumps([name, arguments], sort_keys=True)
    except (TypeError, ValueError):
        return None
