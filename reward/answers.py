"""Which text is the answer, and what text alone says about two answers. No worker, no sympy: microseconds.

`reward/math.py` has the rules in words.
"""

from __future__ import annotations

import re
from decimal import Decimal
from math import prod

MAX_ANSWER_CHARS = 1000

_BRACES = re.compile(r"\\\\|\\(?:boxed|fbox)\s{0,3}\{|\\[{}]|[{}]")
_HASHES = re.compile(r"(?<!#)####(?!#)")
_NUMBER = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.(\d*))?")
# Words that make a number with them another number; unless the question asks for them, as in "how many dozen".
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
# With these a number is an expression; other words are units.
_NOT_UNITS = (
    f"{'|'.join(_SCALES)}|percent|squared|cubed|factorial|half|"
    "and|or|to|over|plus|minus|times|by|of|out|mod|point|pi|sqrt|sin|cos|tan|cot|sec|csc|log|exp"
)
_WITH_UNITS = re.compile(
    rf"([+-]?\\?\$?[+-]?[\d.,]*\d)(?:\s+(?!(?:{_NOT_UNITS})s?\b)[a-z]{{3,}}(?:\s+[a-z]+)*)\.?", re.IGNORECASE
)
_TEXT = r"\\(?:text|textbf|textrm|mathrm|mbox)\{\s*"
_SCALE = rf"(?:\\[ ,;!]|[\s~])*(?:\\?(?:%|{_TEXT}%)|(?:{_TEXT})?(?:percent|{'|'.join(_SCALES)})s?\b)"
_SCALED = re.compile(rf"(.*[\d}})])({_SCALE}[a-z ]*\}}?)", re.IGNORECASE)
_LAST_SCALED = re.compile(rf"(?<![\d.,])([+-]?\\?\$?[\d.,]*\d{_SCALE})\D*$", re.IGNORECASE)
_LABEL = re.compile(
    rf"{_TEXT}[a-z][a-z ]{{2,}}:\s*(?:\}}\s*(?P<behind>[^:]+)|(?P<inside>[^:{{}}]+)\}})"
    r"|[a-z][a-z ]{2,}:(?P<plain>[^:]+)",
    re.IGNORECASE,
)
_EMPHASIS = re.compile(r"(?<![\w*])\*(\\?\$?[+-]?[\d.,]*\d\$?)\*(?![\w*])")
_OR = re.compile(r"\\(?:lor|land|vee|wedge)(?![a-z])|(?<=\d)\s*(?:\\cup|\\mid|\|)\s*(?=[+-]?\d)")
_ARROW = re.compile(r"\\(?:to|gets|implies|iff|equiv|(?:long)?(?:left)?rightarrow)(?![a-z])|[-=]>", re.IGNORECASE)
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-z])|\s")
_BRACKETS = re.compile(r"\\[{}]|[()\[\]{},]")
_FULL_WIDTH = {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}


def narrow(text: str) -> str:
    """Full-width digits and signs, as East Asian text has them, as ASCII."""
    return text.translate(_FULL_WIDTH)


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
    r"""The last marked answer (`\boxed{...}` or `#### ...`), tidied, or None when nothing is marked."""
    box, hashes = last_box(text), last_hashes(text)
    if box is not None and (hashes is None or box[0] > hashes[0]):
        return tidy(box[2])
    return None if hashes is None else tidy(hashes[1])


def tidy(answer: str) -> str:
    """An answer without what surrounds it: space, dollar signs, asterisks, a final period, a label, units of a number.

    "\\text{Total: } 18 dollars." is 18. Words that change the number stay: "18 million", "18 percent", "18 or 20".
    """
    answer = _strip(answer)
    if len(answer) > MAX_ANSWER_CHARS:
        return answer
    if label := _LABEL.fullmatch(answer):
        answer = _strip(label["behind"] or label["inside"] or label["plain"])
    with_units = _WITH_UNITS.fullmatch(answer)
    return with_units[1] if with_units else answer


def _strip(answer: str) -> str:
    answer = answer.strip().strip("*").rstrip(".").strip()
    if len(answer) > 1 and answer[0] == answer[-1] == "$":
        answer = answer.strip("$").strip()
    return answer


def last_scaled(text: str) -> str | None:
    """The last number of running text with its "percent" or "million", None when it has no such word."""
    found = _LAST_SCALED.search(text)
    return found and found[1]


def without_emphasis(text: str) -> str:
    """*5* as 5."""
    return _EMPHASIS.sub(r"\1", text)


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
    """Equality of two answers when their spelling alone decides it; None when it does not."""
    if " ".join(reference.split()) == " ".join(answer.split()):
        return True
    numbers = normal_number(reference), normal_number(answer)
    return None if None in numbers else numbers[0] == numbers[1]


def compare(reference: str, answer: str, question: str) -> bool | tuple[str, str]:
    """Whether two answers are equal when text alone decides it, else the (reference, answer) to compare as mathematics.

    `question` is the prompt: it says whether "5%" answers a question for a percentage or is another number than 5.
    """
    equal = quick_equal(reference, answer)
    if equal is not None:
        return equal
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
    words = re.findall(rf"%|percent|{'|'.join(_SCALES)}", found[2].lower())
    return found[1], tuple("%" if word == "percent" else word for word in words)


def _value(text: str) -> Decimal | None:
    """The number that a plain decimal means with its scale; a percentage is compared with none."""
    head, words = _scale(text)
    number = normal_number(head)
    return None if number is None or "%" in words else Decimal(number) * prod(_SCALES[word] for word in words)


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
