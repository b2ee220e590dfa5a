"""Extracts final answers from text and compares plain numbers, in microseconds; `reward/math.py` states the rules."""

from __future__ import annotations

import re

MAX_ANSWER_CHARS = 1000

_BRACES = re.compile(r"\\\\|\\(?:boxed|fbox)\s{0,3}\{|\\[{}]|[{}]")
_HASHES = re.compile(r"(?<!#)####(?!#)")
_NUMBER = re.compile(r"([+-]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+|(?=\.[0-9]))(?:\.([0-9]*))?")
# Words after a number are its unit, except for these, which change the number or are part of an expression.
_NOT_UNITS = "hundred|thousand|million|billion|trillion|dozen|half|squared|cubed|and|or|pi|sqrt|sin|cos|tan|log"
_WITH_UNIT = re.compile(
    rf"([+-]?\\?\$?[+-]?[0-9.,]*[0-9])\s+(?!(?:{_NOT_UNITS})s?\b)[a-z]{{3,}}(?:\s+[a-z]+)*", re.IGNORECASE
)


def last_box(text: str) -> tuple[int, int, str] | None:
    r"""(start, end, content) of the last complete `\boxed{...}`, the outer one if nested. Takes linear time."""
    last: tuple[int, int, str] | None = None
    opened: list[re.Match[str]] = []
    for token in _BRACES.finditer(text):
        if token[0].endswith("{") and token[0] != r"\{":
            opened.append(token)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start[0] != "{":
                last = (start.start(), token.end(), text[start.end() : token.start()])
    return last


def last_hashes(text: str) -> tuple[int, str] | None:
    """(start, content) of the last `####` that is followed by something on its line."""
    for mark in reversed(list(_HASHES.finditer(text))):
        end = text.find("\n", mark.end())
        content = text[mark.end() : end if end >= 0 else len(text)].strip()
        if content:
            return mark.start(), content
    return None


def extract_answer(text: str) -> str | None:
    r"""The last marked answer (`\boxed{...}` or `#### ...`), cleaned by `clean`, or None without a mark."""
    box = last_box(text)
    hashes = last_hashes(text)
    if box is not None and (hashes is None or box[0] > hashes[0]):
        return clean(box[2])
    return None if hashes is None else clean(hashes[1])


def clean(answer: str) -> str:
    """The answer without surrounding spaces, dollar signs, asterisks and final periods, and without a number's unit.

    "18 dollars." becomes "18". "18 million" and "18 or 20" stay, as their words change the number.
    """
    answer = answer.strip().strip("*").rstrip(".").strip()
    if len(answer) > 1 and answer[0] == answer[-1] == "$":
        answer = answer.strip("$").strip()
    if len(answer) > MAX_ANSWER_CHARS:
        return answer
    with_unit = _WITH_UNIT.fullmatch(answer)
    return with_unit[1] if with_unit else answer


def normal_number(answer: str) -> str | None:
    """A canonical spelling of a plain decimal ("$1,234.50" and "+1234.5" become "1234.5"); None for anything else."""
    text = answer.replace("\\$", "$").replace("\\!", "").replace("{,}", ",").replace("$", "", 1)
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    integer = match[2].replace(",", "").lstrip("0") or "0"
    fraction = (match[3] or "").rstrip("0")
    number = f"{integer}.{fraction}" if fraction else integer
    return f"-{number}" if match[1] == "-" and number != "0" else number


def quick_equal(reference: str, answer: str) -> bool | None:
    """Whether two answers are equal, if identical text or two plain numbers decide it; otherwise None."""
    if " ".join(reference.split()) == " ".join(answer.split()):
        return True
    expected = normal_number(reference)
    actual = normal_number(answer)
    return None if expected is None or actual is None else expected == actual
