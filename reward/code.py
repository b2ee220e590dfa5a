"""The code reward: 1.0 when a completion's program passes all of the row's unit tests, else 0.0."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

from specrl.reward.answers import final_text
from specrl.reward.base import LimitError, Outcome, RewardError, Sample
from specrl.reward.config import RewardConfig
from specrl.reward.pool import WorkerPool
from specrl.reward.sandbox import Ran, UnsupportedTestsError, missing, passes, runs
from specrl.reward.unit_tests import UnitTests, extract_program, unit_tests

SHARE = 0.8
"""Of `reward.timeout_s` that a program may take; the rest starts processes."""
CANARY = {"program": "", **asdict(UnitTests(pairs=(("", ""),)))}
"""A program that passes in no time."""


class CodeReward:
    """The code reward, whose workers start with the first program.

    The program is a block of code of the response (`unit_tests.extract_program`). The row's columns name its tests, in
    the forms that public data sets have (`unit_tests.FORMS`). Rows whose tests have no known form, or that an empty
    program passes, have no score. A program runs confined, see `confined.py`; what it raises, prints or exits with is
    its own fault and scores 0. All tests of a row together have most of `reward.timeout_s`, and a program that takes
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
        self._seconds = SHARE * config.timeout_s
        arguments = [self._seconds, config.memory_mb]
        self.pool = WorkerPool("specrl.reward.code:make_runner", config, arguments, canary=CANARY)
        self._flaws: dict[bytes, Exception | None] = {}  # by a digest of the row

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        """1.0, 0.0, or the exception that prevented the tests."""
        outcomes: list[Any] = [*self.check(samples)]
        sound = [i for i, flaw in enumerate(outcomes) if flaw is None]
        payloads = []
        for i in sound:
            sample = samples[i]
            tests = unit_tests(sample.fields)
            text = final_text(sample.prompt, sample.completion, self._tags)
            payloads.append({"program": extract_program(text, tests, sample.prompt), **asdict(tests)})
        for i, reply in zip(sound, self._passed(payloads), strict=True):
            outcomes[i] = float(reply) if isinstance(reply, bool) else reply
        return outcomes

    def check(self, samples: Sequence[Sample]) -> list[Exception | None]:
        """Why a row has no score: its tests cannot be run, or a program that does nothing passes them."""
        found: dict[bytes, UnitTests | Exception] = {}
        rows = []
        for sample in samples:
            row = blake2b(repr(sample.fields).encode("utf-8", "surrogatepass"), digest_size=16).digest()
            rows.append(row)
            if row not in self._flaws and row not in found:
                try:
                    found[row] = unit_tests(sample.fields)
                except ValueError as error:
                    found[row] = error
        tests = {row: each for row, each in found.items() if isinstance(each, UnitTests)}
        replies = self._passed([{"program": idle(each), **asdict(each)} for each in tests.values()])
        flaws = {row: each for row, each in found.items() if isinstance(each, Exception)}
        for row, reply in zip(tests, replies, strict=True):
            if reply is True:
                flaws[row] = ValueError(
                    "an empty program passes the row's tests, or one that defines their functions to do nothing"
                )
            elif reply is False:
                self._flaws[row] = None
            else:  # not remembered, as it may have another cause
                flaws[row] = reply
        self._flaws |= {row: flaw for row, flaw in flaws.items() if isinstance(flaw, ValueError)}
        return [flaws.get(row, self._flaws.get(row)) for row in rows]

    def _passed(self, payloads: list[dict[str, Any]]) -> list[Any]:
        """Whether each program passes, or why that is not known. Equal ones run once, as many of a prompt are equal.

        A busy machine is not a program's fault: a LimitError says so unless a trivial program is in time now.
        """
        keys = [json.dumps(payload, sort_keys=True, default=str) for payload in payloads]
        distinct = dict(zip(keys, payloads, strict=True))
        replies = dict(zip(distinct, self.pool.map([*distinct.values()]), strict=True))
        if None in replies.values():
            error = LimitError(
                f"the program and its tests took more than {self._seconds:g} s, most of reward.timeout_s"
            )
            error.caused_by_text = self.pool.map([CANARY]) == [True]
            replies = {key: error if reply is None else reply for key, reply in replies.items()}
        return [ValueError(reply) if isinstance(reply, str) else reply for reply in map(replies.get, keys)]

    def close(self) -> None:
        self.pool.close()


def idle(tests: UnitTests) -> str:
    """A program that defines what source of tests needs, as functions that do nothing, and else an empty one.

    Tests that pass it test nothing: an empty program might fail only where they import it.
    """
    names = sorted(tests.needs) if tests.source else []
    return "".join(f"def {name}(*values, **options): pass\n" for name in names if not name.startswith("__"))


def make_runner(seconds: float, memory_mb: int) -> Callable[[dict[str, Any]], bool | str | None]:
    """The handler of a worker: whether a program passes its tests.

    It is None if they take more than `seconds`, and text that says why they cannot be run.
    """

    def handler(payload: dict[str, Any]) -> bool | str | None:
        program = payload["program"]
        limits: Any = {"seconds": seconds, "memory_mb": memory_mb}
        try:
            if pairs := payload["pairs"]:
                with closing(runs(program, [given for given, _ in pairs], **limits)) as ran:
                    return all(map(printed, ran, [wanted for _, wanted in pairs]))
            return passes(program, payload, **limits)
        except TimeoutError:
            return None
        except UnsupportedTestsError as error:
            return f"the row's tests cannot be run: {error}"

    return handler


def printed(ran: Ran, wanted: str) -> bool:
    """Whether a program ended well and printed these lines, without regard to white space at line ends."""
    return ran.code == 0 and _lines(ran.output) == _lines(wanted)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
