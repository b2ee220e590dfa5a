"""Results of deterministic tools: a call that came before has its result at once."""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from specrl.rollout.durable import read_json, write_durably
from specrl.rollout.reduction import Metric, count, mean, seconds

log = logging.getLogger(__name__)

MAX_CHARS = 64 * 2**20
"""Of all results that are kept."""
LONGEST = 2**20
"""Characters of one result that is kept."""
MOST_BEGUN = 64
"""Calls that are begun ahead and have not been asked for."""


@dataclass
class Result:
    """What a tool returned, as TRL shows it to the model, and the seconds that it took."""

    text: str
    seconds: float


class CallsAhead:
    """Calls that drafts say will come, made one after the other in a thread beside the rollout."""

    def __init__(self) -> None:
        self._begun: dict[str, Future[tuple[Any, float]]] = {}
        self._queue: SimpleQueue[tuple[Future[tuple[Any, float]], Callable[[], Any]]] = SimpleQueue()
        self._thread: Thread | None = None

    def begin(self, key: str, call: Callable[[], Any]) -> bool:
        """Queues a call; returns whether it is new, and one of at most MOST_BEGUN."""
        if key in self._begun or len(self._begun) >= MOST_BEGUN:
            return False
        if self._thread is None:
            self._thread = Thread(target=self._work, name="specrl-calls-ahead", daemon=True)
            self._thread.start()
        self._begun[key] = Future()
        self._queue.put((self._begun[key], call))
        return True

    def take(self, key: str) -> Future[tuple[Any, float]] | None:
        """The call and its seconds, if it runs or has run; one that still waits will not run."""
        call = self._begun.pop(key, None)
        return None if call is None or call.cancel() else call

    def ended(self) -> list[tuple[str, Future[tuple[Any, float]]]]:
        """The calls that have ended since the last time."""
        done = [(key, call) for key, call in self._begun.items() if call.done()]
        for key, _ in done:
            del self._begun[key]
        return done

    def _work(self) -> None:
        while True:
            future, call = self._queue.get()
            if not future.set_running_or_notify_cancel():
                continue
            began = time.perf_counter()
            try:
                future.set_result((call(), time.perf_counter() - began))
            except Exception as error:  # raised again where the result is asked for
                future.set_exception(error)


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
        self._ahead = CallsAhead()
        self.begun = 0
        """Calls that were begun ahead, since the last `take_metrics`."""
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
            if key is not None and (begun := self._ahead.take(key)):
                return self._keep(key, *begun.result())
            began = time.perf_counter()
            return self._keep(key, tool(**arguments), time.perf_counter() - began)

        return call

    def foresee(self, tool: Callable, arguments: dict[str, Any]) -> str | None:
        """The result of a call that a draft makes, if it is kept; else None, and a synchronous call is begun.

        Args: tool: declared deterministic, not wrapped.
        """
        for ended, future in self._ahead.ended():
            if not future.exception():
                self._keep(ended, *future.result())
        key = _key(tool.__name__, arguments)
        if key is None:
            return None
        if kept := self._results.get(key):
            return kept.text
        if not inspect.iscoroutinefunction(tool):
            self.begun += self._ahead.begin(key, lambda: tool(**arguments))
        return None

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
        if not (self.calls or self.begun):
            return {}
        metrics = {"tools/kept_ratio": mean(self.hits, self.calls), "tools/saved_s": seconds(self.saved_s)}
        if self.begun:
            metrics["tools/begun"] = count(self.begun)
        self.calls = self.hits = self.begun = 0
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
