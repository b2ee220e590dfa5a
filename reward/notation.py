"""What the notation of two answers says that are not plain numbers: scales, chains of equations, brackets.

`reward/math.py` has the rules in words.
"""

from __future__ import annotations

import re
from decimal import Decimal
from math import prod

from specrl.reward.answers import SCALE, SCALES, normal_number, quick_equal

_SCALED = re.compile(rf"(.*[\d}})])({SCALE}[a-z ]*\}}?)", re.IGNORECASE)
_OR = re.compile(r"\\(?:lor|land|vee|wedge)(?![a-z])|(?<=\d)\s*(?:\\cup|\\mid|\|)\s*(?=[+-]?\d)")
_ARROW = re.compile(r"\\(?:to|gets|implies|iff|equiv|(?:long)?(?:left)?rightarrow)(?![a-z])|[-=]>", re.IGNORECASE)
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-z])|\s")
_BRACKETS = re.compile(r"\\[{}]|[()\[\]{},]")


def compare(reference: str, answer: str, question: str) -> bool | tuple[str, str]:
    """Whether two answers are equal when notation decides it, else the (reference, answer) to compare as mathematics.

    Asked where `quick_equal` does not know. `question` is the prompt: it says whether "5%" answers a question for a
    percentage or is another number than 5.
    """
    scaled = _rescaled(reference, answer, question)
    if isinstance(scaled, bool):
        return scaled
    reference, answer = (_OR.sub(",", text) for text in (reference, scaled))
    kinds = _brackets(reference), _brackets(answer)
    if not _consistent(answer) or (None not in kinds and kinds[0] != kinds[1]):
        return False
    equal = quick_equal(reference, answer)
    return (reference, answer) if equal is None else equal


def _rescaled(reference: str, answer: str, question: str) -> bool | str:
    """The answer as it is to be compared, or the verdict, when it has a percent sign or a word such as "million"."""
    (_, theirs), (head, ours) = _scale(reference), _scale(answer)
    values = _value(reference), _value(answer)
    if not ours or (ours == theirs and None in values):
        return answer
    if len(ours) == 1 and not theirs and _asks_for(question, ours[0]):
        return head
    return None not in values and values[0] == values[1]


def _scale(text: str) -> tuple[str, tuple[str, ...]]:
    """An answer without its scale, and the words of it: ("5", ("million",))."""
    found = _SCALED.fullmatch(text)
    if not found:
        return text, ()
    words = re.findall(rf"%|percent|{'|'.join(SCALES)}", found[2].lower())
    return found[1], tuple("%" if word == "percent" else word for word in words)


def _value(text: str) -> Decimal | None:
    """The number that a plain decimal means with its scale; a percentage is compared with none."""
    head, words = _scale(text)
    number = normal_number(head)
    return None if number is None or "%" in words else Decimal(number) * prod(SCALES[word] for word in words)


def _asks_for(question: str, word: str) -> bool:
    """Whether a question wants its answer in this unit: "what percentage", "how many dozen", "in millions"."""
    if word == "%" and re.search(r"\bpercentages?\b", question, re.IGNORECASE):
        return True
    word = r"(?:percents?\b|\\?%)" if word == "%" else rf"{word}s?\b"
    asking = r"(?:what|which|how (?:many|much)|in|as a|nearest whole)(?:\s+(?:is|was|are|were|the)){0,2}"
    return bool(re.search(rf"\b{asking}\s+{word}", question, re.IGNORECASE))


def _consistent(answer: str) -> bool:
    """False for a chain that equates two numbers, such as 4 = 5; one may be the other rounded."""
    *before, last = _ARROW.split(answer)
    pieces = [piece for piece in before if "=" not in piece] + last.split("=")
    numbers = [normal_number(piece.strip()) for piece in pieces]
    if numbers[-1] is None:
        return True
    value = Decimal(numbers[-1])
    half = Decimal(5).scaleb(value.as_tuple().exponent - 1)
    return all(number is None or abs(Decimal(number) - value) <= half for number in numbers)


def _brackets(answer: str) -> str | None:
    """The kind of a single tuple, list, set or interval, "(]" for (2,3]; None for anything else."""
    text = _SIZES.sub("", re.split(r"=|\\in(?![a-z])", answer)[-1])
    marks = list(_BRACKETS.finditer(text))
    if not marks or marks[0].start() != 0 or marks[0][0] not in ("(", "[", r"\{"):
        return None
    depth, items = 0, 1
    for mark in marks:
        if mark[0] == ",":
            items += depth == 1
            continue
        depth += 1 if mark[0][-1] in "([{" else -1
        if depth == 0:
            return marks[0][0] + mark[0] if mark.end() == len(text) and items > 1 else None
    return None
