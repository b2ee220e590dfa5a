"""The math reward: 1.0 when the final answer of a completion equals the reference answer, else 0.0.

Texts that are identical and plain decimal numbers are compared here (`reward/answers.py`). math-verify decides all
else in a killable worker: fractions, roots, sets, intervals, matrices, expressions, percentages.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

from specrl.reward.answers import MAX_ANSWER_CHARS, clean, extract_answer, quick_equal
from specrl.reward.base import Outcome, Sample
from specrl.reward.config import RewardConfig
from specrl.reward.pool import WorkerPool

TAIL_CHARS = 500


class Comparison(NamedTuple):
    """A request to math-verify: whether `answer` equals `reference`."""

    reference: str
    answer: str
    marked: bool
    """False for running text, in which math-verify has to find the answer."""


CANARY = Comparison(r"\frac{1}{2}", "0.5", marked=True)


class MathReward:
    """The math reward, whose workers start when the first answer needs math-verify.

    The last marked answer counts, in completion and reference alike: the content of a complete `\\boxed{...}` (or
    `\\fbox{...}`), or the rest of the line after `####`, whichever starts later. Unit words after a number are ignored:
    "18 dollars" is 18. A completion without a mark is parsed by math-verify, from its last 500 characters; a reference
    without a mark is the answer itself.

    There is no score without a reference answer, for a reference that math-verify cannot read, and at the deadline or
    memory limit. A completion that cannot be parsed scores 0.0, and so does an answer of more than 1,000 characters.
    """

    name = "math"
    deterministic = True
    verifiable = True

    def __init__(self, config: RewardConfig | None = None):
        self.pool = WorkerPool("specrl.reward.math:make_checker", config, canary=CANARY._asdict())

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        """1.0, 0.0, None without a reference answer, or the exception that prevented the check."""
        outcomes = [_quick_outcome(sample) for sample in samples]
        # Rows of one prompt share their reference and often their answer, so equal comparisons are made once.
        comparisons = list(dict.fromkeys(outcome for outcome in outcomes if isinstance(outcome, Comparison)))
        replies = self.pool.map([comparison._asdict() for comparison in comparisons])
        verdicts = dict(zip(comparisons, replies, strict=True))
        scored = [verdicts[outcome] if isinstance(outcome, Comparison) else outcome for outcome in outcomes]
        return [float(outcome) if isinstance(outcome, bool) else outcome for outcome in scored]

    def close(self) -> None:
        self.pool.close()


def _quick_outcome(sample: Sample) -> bool | Exception | Comparison | None:
    """The outcome where the text alone decides it, else the comparison for math-verify."""
    if sample.answer is None:
        return None
    reference = extract_answer(sample.answer)
    if reference is None:
        reference = clean(sample.answer)
    if not 0 < len(reference) <= MAX_ANSWER_CHARS:
        return ValueError(
            f"the reference answer must have 1 to {MAX_ANSWER_CHARS} characters, got {len(reference)}: "
            f"{sample.answer!r:.80}; is the right dataset column the answer?"
        )
    answer = extract_answer(sample.completion)
    if answer is None:
        tail = _tail(sample.completion)
        readable = re.search(r"[\d$\\]", tail)  # math-verify reads numbers and marked-up mathematics only
        return Comparison(reference, tail, marked=False) if readable else False
    if not 0 < len(answer) <= MAX_ANSWER_CHARS:
        return False
    equal = quick_equal(reference, answer)
    return Comparison(reference, answer, marked=True) if equal is None else equal


def _tail(completion: str) -> str:
    """The last 500 characters, from the first whole word on."""
    if len(completion) <= TAIL_CHARS:
        return completion
    return completion[-TAIL_CHARS:].partition(" ")[2]


def make_checker() -> Callable[[dict[str, Any]], bool]:
    """The handler of a worker for a `Comparison` as a dict, which always answers the same input alike.

    The handler raises ValueError for a reference that math-verify cannot parse. math-verify's own timeouts are off:
    they are signal alarms, which its inner `except` clauses can swallow. The pool enforces the deadline instead.
    """
    from math_verify import parse, verify
    from sympy.core.random import seed

    for name in ("math_verify.parser", "math_verify.grader"):  # they warn that the timeouts are off
        logging.getLogger(name).setLevel(logging.ERROR)

    def handler(payload: dict[str, Any]) -> bool:
        seed(0)  # some of sympy's algorithms use random numbers
        reference = parse(_boxed(payload["reference"]), parsing_timeout=None)
        if all(isinstance(item, str) for item in reference):  # text that math-verify could not parse
            raise ValueError(f"math-verify cannot read the reference answer {payload['reference']!r:.200}")
        answer = _boxed(payload["answer"]) if payload["marked"] else payload["answer"]
        candidates = _or([], parse, answer, parsing_timeout=None)
        return any(_or(False, verify, *pair, timeout_seconds=None) for pair in product(reference, candidates))

    handler(CANARY._asdict())  # grammars load on first use
    return handler


def _boxed(answer: str) -> str:
    return rf"\boxed{{{answer}}}"


def _or(default: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The function's result, or `default` when math-verify cannot read or compare the arguments.

    Running out of memory is no verdict and is raised, which is why math-verify must not handle its errors itself.
    """
    try:
        return function(*arguments, **options, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:
        return default
