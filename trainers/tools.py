"""Results of deterministic tools: a call that came before has its result at once."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import wraps
from typing import Any

from specrl.rollout.reduction import Metric, mean

MOST = 4096
"""Results that are kept; the oldest are dropped first."""
LONGEST = 2**14
"""Characters of one result that is kept."""


class ToolResults:
    """Results of tools with `tool.deterministic = True`, by the tool's name and its arguments, in this process.

    Such a tool is a function of its arguments. All other tools, and methods of environments, always run. A call that
    raises, whose arguments JSON cannot represent, or whose result is long or a list of content parts is not kept.
    """

    def __init__(self) -> None:
        self._results: dict[str, str] = {}
        self.calls = 0
        """Of deterministic tools, since the last `take_metrics`."""
        self.hits = 0
        """Of `calls`, those whose result was kept."""

    def __len__(self) -> int:
        return len(self._results)

    def wrap(self, tool: Callable) -> Callable:
        """The tool, with its results kept if it is declared deterministic; its schema stays the same."""
        if getattr(tool, "deterministic", False) is not True:
            return tool
        name = tool.__name__
        if inspect.iscoroutinefunction(tool):

            @wraps(tool)
            async def call_later(**arguments: Any) -> Any:
                key = _key(name, arguments)
                if (kept := self._find(key)) is not None:
                    return kept
                return self._keep(key, await tool(**arguments))

            return call_later

        @wraps(tool)
        def call(**arguments: Any) -> Any:
            key = _key(name, arguments)
            if (kept := self._find(key)) is not None:
                return kept
            return self._keep(key, tool(**arguments))

        return call

    def _find(self, key: str | None) -> str | None:
        self.calls += 1
        result = self._results.get(key) if key else None
        self.hits += result is not None
        return result

    def _keep(self, key: str | None, value: Any) -> Any:
        if key is None or isinstance(value, list) or len(text := str(value)) > LONGEST:
            return value
        self._results[key] = text
        if len(self._results) > MOST:
            del self._results[next(iter(self._results))]
        return value

    def take_metrics(self) -> dict[str, Metric]:
        """The metrics of the calls since the last time; none where there were none."""
        if not self.calls:
            return {}
        metrics = {"tools/kept_ratio": mean(self.hits, self.calls)}
        self.calls = self.hits = 0
        return metrics


def _key(name: str, arguments: dict[str, Any]) -> str | None:
    try:
        return json.dumps([name, arguments], sort_keys=True)
    except (TypeError, ValueError):
        return None
