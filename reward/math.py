"""The math reward: 1.0 when the final answer of a completion equals the reference answer, else 0.0.

Equal text, words, letters of choices and plain decimal numbers are compared here (`reward/spelling.py`). math-verify
decides all else in a killable worker: fractions, roots, sets, intervals, matrices, expressions, percentages.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

from specrl.reward.answers import final_text, marked_answer, said_answer
from specrl.reward.base import Outcome, Sample
from specrl.reward.config import RewardConfig
from specrl.reward.pool import WorkerPool
from specrl.reward.spelling import (
    MAX_ANSWER_CHARS,
    canonical,
    is_choice,
    is_words,
    normal_number,
    quick_equal,
    written_out,
)

TAIL_CHARS = 500
SMALL = 1e-4
"""Numbers below it are compared by their digits, as math-verify rounds to six decimal places."""
_PROSE = re.compile(r"[^\W\d_]{2,}\s+[^\W\d_]{2,}")
_DOTS = re.compile(r"\\[lc]?dots|\.\.\.")


class Comparison(NamedTuple):
    """A request to math-verify: whether `answer` equals `reference`."""

    reference: str
    answer: str
    marked: bool = True
    """False for running text, in which math-verify has to find the answer."""


CANARY = Comparison(r"\frac{1}{2}", "0.5")


class MathReward:
    """The math reward, whose workers start when the first answer needs math-verify.

    The answer follows the thoughts (`reward.thinking_tags`) and is marked. It is the content of the last
    `\\boxed{...}`; several boxes with only commas, "and" or "or" between them are one answer. Without a box it is the
    value after `####`. In a completion without a mark math-verify finds it, in the last 500 characters; a reference
    without a mark is the answer itself. Units after a number are ignored: "18 dollars" is 18. A variable is no unit:
    "3t" is not 3.

    There is no score without a reference answer, for a reference that cannot be read, and at the deadline or memory
    limit. A completion that cannot be parsed scores 0.0, and so does an answer of more than 1,000 characters.
    """

    name = "math"
    deterministic = True
    verifiable = True

    def __init__(self, config: RewardConfig | None = None):
        config = config or RewardConfig()
        self._tags = config.thinking_tags
        self.pool = WorkerPool("specrl.reward.math:make_checker", config, canary=CANARY._asdict())

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        """1.0, 0.0, None without a reference answer, or the exception that prevented the check."""
        return self._decided([self._quick_outcome(sample) for sample in samples])

    def check(self, samples: Sequence[Sample]) -> list[Exception | None]:
        """Why a row cannot be scored: it has no reference answer, or one that does not equal itself in a box."""
        outcomes = self._decided([_itself(sample) for sample in samples])
        return [None if outcome == 1 else _unreadable(s, outcome) for s, outcome in zip(samples, outcomes, strict=True)]

    def _decided(self, outcomes: list[bool | Exception | Comparison | None]) -> list[Outcome]:
        """The outcomes, with the verdict of math-verify in place of each comparison."""
        verdicts = iter(self.pool.map_once([each._asdict() for each in outcomes if isinstance(each, Comparison)]))
        decided = [next(verdicts) if isinstance(each, Comparison) else each for each in outcomes]
        return [float(outcome) if isinstance(outcome, bool) else outcome for outcome in decided]

    def close(self) -> None:
        self.pool.close()

    def _quick_outcome(self, sample: Sample) -> bool | Exception | Comparison | None:
        """The outcome where the text alone decides it, else the comparison for math-verify."""
        reference = _reference(sample)
        if not isinstance(reference, str):
            return reference
        text = final_text(sample.prompt, sample.completion, self._tags)
        marked = marked_answer(text)
        if marked is not None:
            return _compared(reference, canonical(marked))
        if is_words(reference) or is_choice(reference):
            return bool(quick_equal(reference, said_answer(text)))
        tail = _tail(text).replace(r"\$", "")
        readable = re.search(r"[\d$\\]", tail)  # math-verify reads numbers and marked-up mathematics only
        return Comparison(reference, written_out(tail, "$"), marked=False) if readable else False


def _reference(sample: Sample) -> str | Exception | None:
    """The reference answer, why it cannot be read, or None without one."""
    if sample.answer is None:
        return None
    marked = marked_answer(sample.answer)
    reference = canonical(sample.answer if marked is None else marked)
    if not 0 < len(reference) <= MAX_ANSWER_CHARS:
        return ValueError(
            f"the reference answer must have 1 to {MAX_ANSWER_CHARS} characters, got {len(reference)}: "
            f"{sample.answer!r:.80}; is the right dataset column the answer?"
        )
    if _PROSE.search(reference) and (not is_words(reference) or reference.count(" ") > 2):
        return ValueError(
            f"the reference answer {sample.answer!r:.80} is a sentence, which cannot be compared. Put the answer alone "
            "into that column, or mark it with \\boxed{...}"
        )
    return reference


def _itself(sample: Sample) -> bool | Exception | Comparison | None:
    """The comparison of a reference with itself, which only math-verify may be unable to read."""
    reference = _reference(sample)
    if not isinstance(reference, str):
        return reference
    decided = is_words(reference) or is_choice(reference) or normal_number(reference) is not None
    return True if decided else Comparison(reference, reference)


def _unreadable(sample: Sample, outcome: Outcome) -> Exception:
    if isinstance(outcome, Exception):
        return outcome
    if outcome is None:
        return ValueError("the row has no reference answer")
    return ValueError(
        f"math-verify reads the reference answer {sample.answer!r:.80} in a way that does not equal itself"
    )


def _compared(reference: str, answer: str) -> bool | Comparison:
    if not 0 < len(answer) <= MAX_ANSWER_CHARS:
        return False
    equal = quick_equal(reference, answer)
    return Comparison(reference, answer) if equal is None else equal


def _tail(completion: str) -> str:
    """The last 500 characters, from the first whole word on."""
    if len(completion) <= TAIL_CHARS:
        return completion
    return completion[-TAIL_CHARS:].partition(" ")[2]


def make_checker() -> Callable[[dict[str, Any]], bool]:
    """The handler of a worker for a `Comparison` as a dict, which always answers the same input alike.

    The handler raises ValueError for a reference that math-verify cannot parse. math-verify's own timeouts are off:
    they are signal alarms, which its inner `except` clauses can swallow. The pool enforces the deadline instead. It
    leaves units alone: it would drop a last letter as a unit, a variable's too, on both sides.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from sympy.core.random import seed

    for name in ("math_verify.parser", "math_verify.grader"):  # they warn that the timeouts are off
        logging.getLogger(name).setLevel(logging.ERROR)
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=True)
    )

    def handler(payload: dict[str, Any]) -> bool:
        seed(0)  # some of sympy's algorithms use random numbers
        reference = parse(_boxed(payload["reference"]), [latex], parsing_timeout=None)
        if all(isinstance(item, str) for item in reference):  # text that math-verify could not parse
            raise ValueError(f"math-verify cannot read the reference answer {payload['reference']!r:.200}")
        marked = payload["marked"]
        answer = _boxed(payload["answer"]) if marked else payload["answer"]
        kinds = [latex] if marked else [latex, ExprExtractionConfig()]
        candidates = _or([], parse, answer, kinds, parsing_timeout=None)
        return any(
            _or(False, verify, *pair, timeout_seconds=None) and _same_digits(*pair)
            for pair in product(reference, candidates)
        )

    handler(CANARY._asdict())  # grammars load on first use
    return handler


def _boxed(answer: str) -> str:
    """The answer in a box. Dots between numbers become a symbol, which must be in both answers."""
    return "\\boxed{" + _DOTS.sub(r"\\delta_{\\infty}", answer) + "}"


def _same_digits(reference: Any, answer: Any) -> bool:
    """False for two small numbers that are equal only once they are rounded to zero, such as 1/30! and 1/32!."""
    if not (getattr(reference, "is_number", False) and getattr(answer, "is_number", False)):
        return True
    wanted = abs(reference.doit().evalf(30))
    given = abs(answer.doit().evalf(30))
    larger = max(wanted, given)
    return bool(larger >= SMALL or abs(wanted - given) <= SMALL * larger)


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
