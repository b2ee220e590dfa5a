"""The code reward: 1.0 when a completion's program passes all of the row's unit tests, else 0.0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from specrl.reward.answers import final_text
from specrl.reward.base import Outcome, RewardError, Sample, attempt
from specrl.reward.config import RewardConfig
from specrl.reward.pool import WorkerPool
from specrl.reward.sandbox import Ran, UnsupportedTestsError, missing, passes, runs
from specrl.reward.unit_tests import UnitTests, extract_program, unit_tests

CANARY = {"program": "", **asdict(UnitTests(pairs=(("", ""),)))}
"""A program that passes in no time."""


class CodeReward:
    """The code reward, whose workers start with the first program.

    The program is a block of code of the response (`unit_tests.extract_program`). The row's columns name its tests, in
    the forms that public data sets have (`unit_tests.FORMS`). Rows whose tests have no known form, or that an empty
    program passes, have no score (`check`). A program runs confined, see `confined.py`; what it raises, prints or exits
    with is its own fault and scores 0. All tests of a row together have `reward.timeout_s`, and a program that takes
    longer is over the limit (`reward.on_limit`).

    Tests run in a process that the program cannot see, and ask it for the results of calls (`remote.py`); so do
    wanted outputs stay outside. A program learns its inputs, and nothing of what is wanted. Where tests compare two
    objects of the program's own types, the program decides whether these are equal.
    """

    name = "code"
    deterministic = True
    verifiable = True

    def __init__(self, config: RewardConfig | None = None):
        config = config or RewardConfig()
        if reason := missing():
            raise RewardError(reason)
        self._tags = config.thinking_tags
        arguments = [config.timeout_s, config.memory_mb]
        self.pool = WorkerPool("specrl.reward.code:make_runner", config, arguments, canary=CANARY)

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        """1.0, 0.0, or the exception that prevented the tests. Raises ValueError where one has no known form."""
        payloads = []
        for sample in samples:
            tests = unit_tests(sample.fields)
            text = final_text(sample.prompt, sample.completion, self._tags)
            payloads.append({"program": extract_program(text, tests, sample.prompt), **asdict(tests)})
        return [float(reply) if isinstance(reply, bool) else reply for reply in self._passed(payloads)]

    def check(self, samples: Sequence[Sample]) -> list[Exception | None]:
        """Why a row has no score: its tests cannot be run, or a program that does nothing passes them."""
        tests = [attempt(unit_tests, sample.fields) for sample in samples]
        known = [each for each in tests if isinstance(each, UnitTests)]
        replies = iter(self._passed([{"program": idle(each), **asdict(each)} for each in known]))
        found = [next(replies) if isinstance(each, UnitTests) else each for each in tests]
        flaw = ValueError("an empty program passes the row's tests, or one that defines their functions to do nothing")
        return [flaw if reply is True else reply or None for reply in found]

    def _passed(self, payloads: list[dict[str, Any]]) -> list[Any]:
        """Whether each program passes, or why that is not known."""
        replies = self.pool.map_once(payloads)
        return [ValueError(reply) if isinstance(reply, str) else reply for reply in replies]

    def close(self) -> None:
        self.pool.close()


def idle(tests: UnitTests) -> str:
    """A program that defines what source of tests needs, as functions that do nothing, and else an empty one.

    Tests that pass it test nothing: an empty program might fail only where they import it.
    """
    names = sorted(tests.needs) if tests.source else []
    return "".join(f"def {name}(*values, **options): pass\n" for name in names if not name.startswith("__"))


def make_runner(timeout_s: float, memory_mb: int) -> Callable[[dict[str, Any]], bool | str]:
    """The handler of a worker: whether a program passes its tests, or text that says why they cannot be run.

    The pool ends a program that takes longer than `timeout_s`, with the worker; the sandbox would do so later.
    """

    def handler(payload: dict[str, Any]) -> bool | str:
        program = payload["program"]
        limits: Any = {"seconds": 2 * timeout_s, "memory_mb": memory_mb}
        try:
            if pairs := payload["pairs"]:
                with closing(runs(program, [given for given, _ in pairs], **limits)) as ran:
                    return all(map(printed, ran, [wanted for _, wanted in pairs]))
            return passes(program, payload, **limits)
        except UnsupportedTestsError as error:
            return f"the row's tests cannot be run: {error}"

    return handler


def printed(ran: Ran, wanted: str) -> bool:
    """Whether a program ended well and printed these lines, without regard to white space at line ends."""
    return ran.code == 0 and _stripped(ran.output) == _stripped(wanted)


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip()
