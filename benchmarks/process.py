"""Engines in separate processes, which answer a line of JSON with a line.

vLLM keeps settings in the environment and one pool of sleeping memory in a process, so two engines in one process would
influence each other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, Protocol

from specrl.rollout.types import RolloutError

USERS = dict(os.environ)
"""The environment as it was before an engine of this process could change it."""


class Answering(Protocol):
    """An engine that `serve` calls."""

    def answer(self, message: dict) -> dict: ...
    def close(self) -> None: ...


class Process:
    """The caller's end.

    Args: module: calls `serve` when it is run; opening: what it makes its engine of.

    Raises:
        RolloutError: it failed in its process, with that message.
    """

    def __init__(self, module: str, **opening: Any):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process runs
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen([sys.executable, "-m", module], env=USERS, text=True, **pipes)
        try:
            self.ask(**opening)
        except RolloutError:
            self.close()
            raise

    def ask(self, **message: Any) -> dict:
        """Sends a message and waits for the answer."""
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().strip().rpartition("\n")[2]
            raise RolloutError(f"the process of an engine ended with {self._process.returncode}: {said}")
        answer = json.loads(line)
        if "error" in answer:
            raise RolloutError(answer["error"])
        return answer

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def serve(start: Callable[[dict], Answering]) -> None:
    """The other end, until the caller closes it. Whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine: Answering | None = None
    for line in sys.stdin:
        try:
            message = json.loads(line)
            if engine is None:
                engine, answer = start(message), {}
            else:
                answer = engine.answer(message)
        except Exception as error:  # the caller decides what it means
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if engine is not None:
        engine.close()
