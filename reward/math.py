"""The math reward: 1.0 when the final answer of a completion equals the reference answer, else 0.0.

Which answer counts, in a completion and in a reference alike:

1. The last marked answer: the content of a complete `\\boxed{...}` (or `\\fbox{...}`), or the rest of the line after
   `####`, whichever starts later. An unclosed box and a `####` with nothing behind it are no answers. As in GSM8K,
   unit words after a `####` number do not matter ("#### 18 dollars" is 18); "18 million" and "18 or 20" stay whole.
2. A completion without a mark: what math-verify finds in its last 500 characters ("The answer is $\\frac{1}{2}$.").
   A reference without a mark is taken as the answer itself.

When two answers are equal: first, here, in microseconds: plain decimal numbers (sign, thousands commas, dollar sign,
and trailing zeros do not matter) compare exactly as numbers, and identical text is equal. Everything else is decided by
math-verify in a killable worker: fractions, roots, sets, intervals, matrices, expressions, units in `\\text{}`.

No score (None, masked and counted): no reference answer, a reference that math-verify cannot read, the deadline, the
memory limit. A completion that cannot be parsed is wrong (0.0), and so is an answer of more than 1,000 characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from reward.base import Sample, scores
from reward.workers import WorkerPool

MAX_ANSWER_CHARS = 1000
TAIL_CHARS = 500

_BRACES = re.compile(r"\\\\|\\(?:boxed|fbox)\s{0,3}\{|\\[{}]|[{}]")
_HASHES = re.compile(r"(?<!#)####(?!#)")
_NUMBER = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.(\d*))?")
# Words that make a number with them another number; the rest are units.
_NOT_UNITS = (
    "hundred|thousand|million|billion|trillion|dozen|percent|squared|cubed|factorial|half|"
    "and|or|to|over|plus|minus|times|by|of|out|mod|point|pi|sqrt"
)
_WITH_UNITS = re.compile(
    rf"([+-]?\$?[+-]?[\d.,]*\d)(?:\s+(?!(?:{_NOT_UNITS})\b)[a-z]{{3,}}(?:\s+[a-z]+)*)\.?", re.IGNORECASE
)


def last_box(text: str) -> tuple[int, int, str] | None:
    r"""(start, end, content) of the last complete `\boxed{...}`, the outer one if nested; in linear time."""
    found: tuple[int, int, str] | None = None
    opened: list[re.Match[str]] = []
    for token in _BRACES.finditer(text):
        if token[0].endswith("{") and token[0] != r"\{":
            opened.append(token)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start[0] != "{":
                found = (start.start(), token.end(), text[start.end() : token.start()])
    return found


def last_hashes(text: str) -> tuple[int, str] | None:
    """(start, content) of the last `####` with something after it on its line."""
    for mark in reversed(list(_HASHES.finditer(text))):
        end = text.find("\n", mark.end())
        content = text[mark.end() : end if end >= 0 else len(text)].strip()
        if content:
            return mark.start(), content
    return None


def extract_answer(text: str) -> str | None:
    r"""The last marked answer (`\boxed{...}` or `#### ...`, rule 1 of the module), or None when nothing is marked.

    Surrounding space, dollar signs that enclose it, asterisks and a final period are removed; an empty box gives "".
    """
    box, hashes = last_box(text), last_hashes(text)
    if box is not None and (hashes is None or box[0] > hashes[0]):
        return _strip(box[2])
    if hashes is None:
        return None
    answer = _strip(hashes[1])
    with_units = _WITH_UNITS.fullmatch(answer)
    return with_units[1] if with_units else answer


def _strip(answer: str) -> str:
    answer = answer.strip().strip("*").rstrip(".").strip()
    if len(answer) > 1 and answer[0] == answer[-1] == "$":
        answer = answer.strip("$").strip()
    return answer


def normal_number(answer: str) -> str | None:
    """One spelling per number for plain decimals ("$1,234.50", "+1234.5" -> "1234.5"), None for anything else."""
    if not answer or answer[-1] not in "0123456789.":
        return None
    text = answer.replace("\\$", "$").replace("\\!", "").replace("{,}", ",").replace(" ", "")
    match = _NUMBER.fullmatch(text.replace("$", "", 1))
    if match is None or " " in answer.strip("$+- \\"):
        return None
    whole = match[2].replace(",", "").lstrip("0") or "0"
    part = (match[3] or "").rstrip("0")
    number = f"{whole}.{part}" if part else whole
    return f"-{number}" if match[1] == "-" and number != "0" else number


def quick_equal(reference: str, answer: str) -> bool | None:
    """Equality of two extracted answers when text alone decides it; None when it takes math-verify."""
    if " ".join(reference.split()) == " ".join(answer.split()):
        return True
    numbers = normal_number(reference), normal_number(answer)
    return None if None in numbers else numbers[0] == numbers[1]


def make_checker() -> Callable[[dict[str, Any]], bool]:
    """In a worker: math-verify as handler({"reference", "answer", "marked"}) -> bool, the same for the same input.

    Raises ValueError for a reference in which nothing can be parsed. math-verify's own timeouts are off: they are
    signal alarms, which its inner `except` clauses can swallow; the pool's deadline holds from outside.
    """
    import logging
    from itertools import product

    from math_verify import parse, verify
    from sympy.core.random import seed

    for name in ("math_verify.parser", "math_verify.grader"):  # they warn that the timeouts are off
        logging.getLogger(name).setLevel(logging.ERROR)

    def handler(payload: dict[str, Any]) -> bool:
        seed(0)  # some of sympy's algorithms draw from this generator
        reference = parse(rf"\boxed{{{payload['reference']}}}", parsing_timeout=None)
        if all(isinstance(item, str) for item in reference):  # text that math-verify could not read
            raise ValueError(f"math-verify cannot read the reference answer {payload['reference']!r:.200}")
        text = rf"\boxed{{{payload['answer']}}}" if payload["marked"] else payload["answer"]
        return any(_same(verify, *pair) for pair in product(reference, _parse_completion(parse, text)))

    handler({"reference": r"\frac{1}{2}", "answer": "0.5", "marked": True})  # grammars load on first use
    return handler


def _parse_completion(parse: Callable[..., list[Any]], text: str) -> list[Any]:
    try:
        return parse(text, parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:  # text that math-verify cannot read is not an answer
        return []


def _same(verify: Callable[..., bool], reference: Any, answer: Any) -> bool:
    try:
        return verify(reference, answer, timeout_seconds=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:  # what cannot be compared with the reference is not equal to it
        return False


class MathReward:
    """The math reward (rules at the top of the module). Workers start when the first answer needs math-verify."""

    name = "math"
    deterministic = True

    def __init__(self, timeout_s: float = 5.0, memory_mb: int = 2048, workers: int = 1):
        self.pool = WorkerPool("reward.math:make_checker", workers=workers, timeout_s=timeout_s, memory_mb=memory_mb)

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        return scores(self, samples)

    def outcomes(self, samples: Sequence[Sample]) -> list[float | Exception | None]:
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
        reference = extract_answer(sample.answer)
        reference = sample.answer.strip() if reference is None else reference
        if not 0 < len(reference) <= MAX_ANSWER_CHARS:
            return ValueError(
                f"the reference answer must have 1 to {MAX_ANSWER_CHARS} characters, got {len(reference)}: "
                f"{sample.answer!r:.80}; is the right dataset column the answer?"
            )
        answer = extract_answer(sample.completion)
        if answer is None:
            tail = sample.completion[-TAIL_CHARS:]
            if len(sample.completion) > TAIL_CHARS:
                tail = tail.partition(" ")[2]  # the first word may be cut
            # math-verify reads numbers and marked-up mathematics only
            return (reference, tail, False) if re.search(r"[\d$\\]", tail) else False
        if not 0 < len(answer) <= MAX_ANSWER_CHARS:
            return False
        equal = quick_equal(reference, answer)
        return (reference, answer, True) if equal is None else equal
