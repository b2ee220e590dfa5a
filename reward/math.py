"""The math reward: 1.0 when the final answer of a completion equals the reference answer, else 0.0.

Which answer counts, in a completion and in a reference alike:

1. The last marked answer: the content of a complete `\\boxed{...}` (or `\\fbox{...}`), or the rest of the line after
   `####`, whichever starts later. An unclosed box and a `####` with nothing behind it are no answers. A label before it
   and unit words after a number do not matter: "\\text{Total: } 18 dollars" is 18; "18 or 20" stays whole.
2. A completion without a mark: what math-verify finds in its last 500 characters ("The answer is $\\frac{1}{2}$.").
   A reference without a mark is taken as the answer itself.

When two answers are equal: first, in `reward/answers.py`, in microseconds: plain decimal numbers (sign, thousands
commas, dollar sign, full-width digits, and trailing zeros do not matter) compare exactly as numbers, and identical text
is equal. Then, in `reward/notation.py`, not equal are these, which math-verify would read as their last number or
regardless of their form:

- another scale: "5%" is 5 where the reference is a percentage or the question wants one ("what percentage"), else it is
  wrong; "5 million" is 5000000, or 5 where the question wants millions;
- two answers: "x=4 \\lor x=5" is the list 4, 5; numbers that are not equal, "4 = 5" or "4 \\to 5", are no answer;
- another kind of bracket: (1,2,3), [1,2,3] and \\{1,2,3\\} differ, and so do (8,-2) and [8,-2].

Everything else is decided by math-verify in a killable worker: fractions, roots, sets, intervals, matrices,
expressions, units in `\\text{}`.

No score (None, masked and counted): no reference answer, a reference that math-verify cannot read, the deadline, the
memory limit. A completion that cannot be parsed is wrong (0.0), and so is an answer of more than 1,000 characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from specrl.reward.answers import (
    MAX_ANSWER_CHARS,
    extract_answer,
    last_scaled,
    narrow,
    quick_equal,
    tidy,
    without_emphasis,
)
from specrl.reward.base import Outcome, Sample
from specrl.reward.config import RewardConfig
from specrl.reward.pool import WorkerPool

TAIL_CHARS = 500
CANARY = {"reference": r"\frac{1}{2}", "answer": "0.5", "marked": True}


class MathReward:
    """The math reward (rules at the top of the module). Workers start when the first answer needs math-verify."""

    name = "math"
    deterministic = True
    verifiable = True

    def __init__(self, config: RewardConfig | None = None):
        self.pool = WorkerPool("specrl.reward.checker:make_checker", config, canary=CANARY)

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        """1.0, 0.0, None without a reference answer, or the exception that prevented the check."""
        found: list[Any] = [self._quick(sample) for sample in samples]
        # Equal questions are asked once: the rows of one prompt share their reference and often their answer.
        asked = list(dict.fromkeys(item for item in found if isinstance(item, tuple)))
        payloads = [{"reference": reference, "answer": answer, "marked": marked} for reference, answer, marked in asked]
        verdicts = dict(zip(asked, self.pool.map(payloads), strict=True)) if asked else {}
        outcomes = [verdicts[item] if isinstance(item, tuple) else item for item in found]
        return [float(outcome) if isinstance(outcome, bool) else outcome for outcome in outcomes]

    def close(self) -> None:
        self.pool.close()

    @staticmethod
    def _quick(sample: Sample) -> bool | Exception | tuple[str, str, bool] | None:
        """The outcome when text alone decides, else (reference, answer, marked) for math-verify."""
        if sample.answer is None:
            return None
        text, completion = narrow(sample.answer), narrow(sample.completion)
        reference = extract_answer(text)
        reference = tidy(text) if reference is None else reference
        if not 0 < len(reference) <= MAX_ANSWER_CHARS:
            return ValueError(
                f"the reference answer must have 1 to {MAX_ANSWER_CHARS} characters, got {len(reference)}: "
                f"{sample.answer!r:.80}; is the right dataset column the answer?"
            )
        answer = extract_answer(completion)
        if answer is None:
            tail = completion[-TAIL_CHARS:]
            if len(completion) > TAIL_CHARS:
                tail = tail.partition(" ")[2]  # the first word may be cut
            answer = last_scaled(tail)
            if answer is None:
                # math-verify reads numbers and marked-up mathematics only
                return (reference, without_emphasis(tail), False) if re.search(r"[\d$\\]", tail) else False
        if not 0 < len(answer) <= MAX_ANSWER_CHARS:
            return False
        equal = quick_equal(reference, answer)
        if equal is None:  # seldom where answers are numbers
            from specrl.reward.notation import compare

            equal = compare(reference, answer, sample.prompt)
        return equal if isinstance(equal, bool) else (*equal, True)
