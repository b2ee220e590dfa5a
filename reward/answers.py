"""Which text is the answer, and whether two answers are spelled alike. No worker, no sympy: microseconds.

`reward/math.py` has the rules in words.
"""

from __future__ import annotations

import re

MAX_ANSWER_CHARS = 1000

_BRACES = re.compile(r"\\\\|\\(?:boxed|fbox)\s{0,3}\{|\\[{}]|[{}]")
_HASHES = re.compile(r"(?<!#)####(?!#)")
_NUMBER = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.(\d*))?")
# Words that make a number with them another number; unless the question asks for them, as in "how many dozen".
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
# With these a number is an expression; other words are units.
_NOT_UNITS = (
    f"{'|'.join(SCALES)}|percent|squared|cubed|factorial|half|"
    "and|or|to|over|plus|minus|times|by|of|out|mod|point|pi|sqrt|sin|cos|tan|cot|sec|csc|log|exp"
)
_WITH_UNITS = re.compile(
    rf"([+-]?\\?\$?[+-]?[\d.,]*\d)(?:\s+(?!(?:{_NOT_UNITS})s?\b)[a-z]{{3,}}(?:\s+[a-z]+)*)\.?", re.IGNORECASE
)
_TEXT = r"\\(?:text|textbf|textrm|mathrm|mbox)\{\s*"
SCALE = rf"(?:\\[ ,;!]|[\s~])*(?:\\?(?:%|{_TEXT}%)|(?:{_TEXT})?(?:percent|{'|'.join(SCALES)})s?\b)"
_LAST_SCALED = re.compile(rf"(?<![\d.,])([+-]?\\?\$?[\d.,]*\d{SCALE})\D*$", re.IGNORECASE)
_LABEL = re.compile(
    rf"{_TEXT}[a-z][a-z ]{{2,}}:\s*(?:\}}\s*(?P<behind>[^:]+)|(?P<inside>[^:{{}}]+)\}})"
    r"|[a-z][a-z ]{2,}:(?P<plain>[^:]+)",
    re.IGNORECASE,
)
_EMPHASIS = re.compile(r"(?<![\w*])\*(\\?\$?[+-]?[\d.,]*\d\$?)\*(?![\w*])")
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
