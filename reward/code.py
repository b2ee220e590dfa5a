"""The code reward: 1.0 when a completion's program passes all of the row's unit tests, else 0.0."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import Any

from specrl.reward.base import LimitError, Outcome, RewardError, Sample
from specrl.reward.config import RewardConfig
from specrl.reward.pool import WorkerPool
from specrl.reward.sandbox import run

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
TESTS = "tests", "test_list", "test"
"""Columns with Python code that raises where the program is wrong: a text, or a list of texts."""
SETUP = "test_setup_code", "test_imports"
"""Columns with Python code that runs before the tests."""
SHARE = 0.8
"""Of `reward.timeout_s` that a program may take; the rest starts processes."""
CANARY = {"programs": [["", "", None]]}
"""A program that passes in no time."""


class CodeReward:
    """The code reward, whose workers start with the first program.

    The program is the last complete block between ``` and ```, or the whole completion without one. The row's columns
    name its tests: `tests`, `test_list` or `test` (assertions, or with `entry_point` a function `check(candidate)`, as
    HumanEval has it), or `inputs` and `outputs`, lists of what a program reads and prints, compared without white space
    at line ends. A program runs in a directory of its own, see `sandbox.py`; what it raises, prints or exits with is
    its own fault and scores 0. All tests of a row together have most of `reward.timeout_s`, and a program that takes
    longer is over the limit (`reward.on_limit`).

    The program and its assertions share a process, as usual, so a program that tampers with Python may pass them.
    """

    name = "code"
    deterministic = True
    verifiable = True

    def __init__(self, config: RewardConfig | None = None):
        config = config or RewardConfig()
        self._seconds = SHARE * config.timeout_s
        arguments = [self._seconds, config.memory_mb]
        self.pool = WorkerPool("specrl.reward.code:make_runner", config, arguments, canary=CANARY)

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        """1.0, 0.0, or the exception that prevented the tests. Raises RewardError for rows without tests."""
        programs = [_programs(sample) for sample in samples]
        # responses to one prompt are often equal
        keys = [repr(part) for part in programs]
        payloads = dict(zip(keys, programs, strict=True))
        replies = self.pool.map([{"programs": part} for part in payloads.values()])
        passed = dict(zip(payloads, self._limited(replies), strict=True))
        return [float(passed[key]) if isinstance(passed[key], bool) else passed[key] for key in keys]

    def _limited(self, replies: list[Any]) -> list[Any]:
        """The replies, with a LimitError for each program that took too long.

        A busy machine is not the program's fault: the error says so unless a trivial program is in time now.
        """
        if None not in replies:
            return replies
        error = LimitError(f"the program and its tests took more than {self._seconds:g} s, most of reward.timeout_s")
        error.caused_by_text = self.pool.map([CANARY]) == [True]
        return [error if reply is None else reply for reply in replies]

    def close(self) -> None:
        self.pool.close()


def extract_program(completion: str) -> str:
    """The last complete block of code, or the completion."""
    blocks = BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def _programs(sample: Sample) -> list[list[str | None]]:
    """What has to run for a sample: source, input, and the output that is right; None where none is compared."""
    program = extract_program(sample.completion)
    fields = sample.fields
    if (tests := _first(fields, TESTS)) is not None:
        lines = [program, *_texts(_first(fields, SETUP)), *_texts(tests)]
        if entry_point := fields.get("entry_point"):
            lines.append(f"check({entry_point})")
        return [["\n".join(lines), "", None]]
    inputs = fields.get("inputs")
    outputs = fields.get("outputs")
    if not inputs or not outputs or len(inputs) != len(outputs):
        raise RewardError(
            f"the code reward found no unit tests in the columns {', '.join(fields) or '(none)'}. It needs one of "
            f"{', '.join(TESTS)}, or `inputs` and `outputs` of equal length"
        )
    return [[program, str(given), str(wanted)] for given, wanted in zip(inputs, outputs, strict=True)]


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((fields[name] for name in names if fields.get(name)), None)


def _texts(code: Any) -> list[str]:
    if code is None:
        return []
    return [code] if isinstance(code, str) else [str(part) for part in code]


def make_runner(seconds: float, memory_mb: int) -> Callable[[dict[str, Any]], bool | None]:
    """The handler of a worker: whether all programs of a payload pass; None if they take more than `seconds`."""

    def handler(payload: dict[str, Any]) -> bool | None:
        deadline = time.monotonic() + seconds
        for source, given, wanted in payload["programs"]:
            left = max(0.01, deadline - time.monotonic())
            try:
                passes = _passes(source, given, wanted, seconds=left, memory_mb=memory_mb)
            except TimeoutError:
                return None
            if not passes:
                return False
        return True

    return handler


def _passes(source: str, given: str, wanted: str | None, *, seconds: float, memory_mb: int) -> bool:
    if wanted is not None:
        ran = run(source, given, seconds=seconds, memory_mb=memory_mb)
        return ran.code == 0 and _lines(ran.output) == _lines(wanted)
    mark = token_hex(16)  # printed after the last assertion, so that a program that exits before does not pass
    ran = run(f"{source}\nprint({mark!r})\n", seconds=seconds, memory_mb=memory_mb)
    return ran.code == 0 and ran.output.rstrip("\n").endswith(mark)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
