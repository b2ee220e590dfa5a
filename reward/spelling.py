"""One spelling for answers that people write in several ways, and comparison by text; `reward/math.py` has the rules.

The texts come from models, so everything here takes linear time.
"""

from __future__ import annotations

import re

MAX_ANSWER_CHARS = 1000

_CHARACTERS = str.maketrans({"−": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "°": r"^\circ", "…": r"\ldots "})
# What may enclose an answer.
_ENCLOSED = re.compile(
    r"\$\$?(?P<dollars>[^$]+)\$\$?|\\\((?P<round>.*)\\\)|\\\[(?P<square>.*)\\\]|\\text\s?\{(?P<text>[^{}]*)\}",
    re.DOTALL,
)
SAYS_SO = re.compile(
    r"(?:the\s+)?(?:final\s+)?answer\b[\s*:]*(?:is\b)?[\s*:=]*|(?:\\approx|≈|about\b|approximately\b)\s*", re.IGNORECASE
)
"""Words that say that an answer follows."""

_NUMBER = re.compile(r"([+-]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+|(?=\.[0-9]))(?:\.([0-9]*))?")
# Thousands grouped by spaces: "18 000", "18\,000", "18{,}000". Those grouped by commas may be a list of numbers.
_GROUPED = re.compile(r"([+-]?\d{1,3})((?:(?:\\[, ]|~|,\\!|\{,\}| )\d{3})+)(?!\d)")
_MIXED = re.compile(r"([+-]?\d+)\s+(\d+)\s?/\s?(\d+)")
_CURRENCY = re.compile(r"([+-]?)\s?(?:\\?\$|[€£¥₹])\s?([+-]?[\d.].*)|([+-]?[\d.,]*\d)\s?[€£¥₹元]", re.DOTALL)

_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_POWER_WORDS = "|".join(_POWERS)
_POWER = re.compile(rf"(?<![\w.])(\d[\d,]*(?:\.\d+)?)\s+({_POWER_WORDS})\b", re.IGNORECASE)
_TEXT_BEGINS = r"\\(?:text|mathrm|mbox)\s?\{\s*"
_NUMERAL_IN_TEXT = re.compile(rf"\s*{_TEXT_BEGINS}(percent|{_POWER_WORDS})\b([^{{}}]*)\}}", re.IGNORECASE)

_FUNCTIONS = "pi|sin|cos|tan|log|ln"
_FUNCTION = re.compile(rf"(?<![\\A-Za-z{{])({_FUNCTIONS})\b")
_MATHEMATICS = {*_FUNCTIONS.split("|"), "exp", "sqrt", "infty", "infinity", "inf", "max", "min"}
# Words after a number are its unit, except for these, which change the number or belong to an expression.
_NO_UNIT = (
    rf"(?!\s*(?:{_POWER_WORDS}|dozen|half|third|quarter|squared|cubed|and|or|to|percent|pct|am|pm|a\.m|p\.m)s?\b"
    rf"|\s*(?:{_FUNCTIONS}|exp|sqrt|alpha|beta|gamma|delta|theta|lambda|omega))"
)
_SHORT_UNIT = r"(?:[mckd]m|[mk]g|[mc][lL]|km/?h|m/s|mph|ft|lbs?|oz|yd|hrs?|min|sec)(?:\^?[23²³])?"
_MORE_WORDS = r"\.?(?:[\s/-]+[^\W\d_]+\.?){0,4}"
_UNIT = (
    rf"\s*{_SHORT_UNIT}(?:{_MORE_WORDS})"  # 18cm, 18 km per hour
    rf"|\s+{_NO_UNIT}[^\W\d_]{{3,}}{_MORE_WORDS}"  # 18 boxes of pens
    rf"|{_NO_UNIT}[^\W\d_]{{4,}}"  # 18dollars; fewer letters may be variables
    r"|\s+\([^()\d]*\)"  # 18 (eighteen)
)
_MEASURED = re.compile(
    rf"([+-]?(?:(?:\d[\d,.]*)?\d(?:\s+(?:\d+\s?/\s?\d+|{_POWER_WORDS}))?|\d+\s?/\s?\d+|\.\d+))(?:{_UNIT})",
    re.IGNORECASE,
)
_MEASURED_IN_TEXT = re.compile(
    rf"(.*[\w}})])\s*(?:\\[, ;]|~)?\s*{_TEXT_BEGINS}{_NO_UNIT}[^{{}}\d]*\}}(?:\^\{{?[23]\}}?)?",
    re.DOTALL | re.IGNORECASE,
)
_ONE_LETTER_UNIT = re.compile(r"(.*\d)\s+[mgshlLNJWVAKCF]")

_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox)\s?\{([^{}]*)\}")
_CHOICE = re.compile(r"\(?([A-J])(?:[).:](?:\s.*)?|$)", re.DOTALL)
_WORDS = re.compile(r"(?=.*[^\W\d_]{3})[^\W\d_]+(?:['-]?[^\W\d_]+)*(?: [^\W\d_]+)*")


def canonical(answer: str) -> str:
    """The answer without what does not belong to it, in the spelling that math-verify reads.

    Removed are spaces and signs around it, "the answer is", currency signs and the unit of a number: "$18 per day."
    becomes "18". Thousands that are grouped by spaces, mixed numbers and "4 million" become LaTeX.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return answer
    answer = _NUMERAL_IN_TEXT.sub(r" \1\2", bare(answer)).rstrip()
    if money := _CURRENCY.fullmatch(answer):
        answer = money[3] or money[1] + money[2]
    if measured := _MEASURED.fullmatch(answer) or _MEASURED_IN_TEXT.fullmatch(answer):
        answer = measured[1].strip()
    if grouped := _GROUPED.match(answer):
        answer = grouped[1] + re.sub(r"\D", "", grouped[2]) + answer[grouped.end() :]
    answer = re.sub(r"^([+-])\s+(?=\d)", r"\1", answer)
    answer = _MIXED.sub(r"\1\\frac{\2}{\3}", answer)
    answer = _FUNCTION.sub(r"\\\1", answer)
    return written_out(answer)


def bare(answer: str) -> str:
    """The answer without surrounding spaces, emphasis, mathematics signs, final periods and "the answer is"."""
    answer = answer.translate(_CHARACTERS)
    before = None
    while answer != before:
        before = answer
        answer = answer.strip().strip("*").rstrip(".").strip()
        if enclosed := _ENCLOSED.fullmatch(answer):
            answer = enclosed[enclosed.lastgroup or 0]
        if said := SAYS_SO.match(answer):
            answer = answer[said.end() :]
    return answer


def written_out(text: str, mark: str = "") -> str:
    """The text with "4 million" as a product. Args: mark: what encloses mathematics in this text."""
    return _POWER.sub(lambda found: rf"{mark}{found[1]} \cdot 10^{{{_POWERS[found[2].lower()]}}}{mark}", text)


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


def plain_text(answer: str) -> str:
    r"""The answer as text: without `\text{...}`, braces and superfluous spaces; words in lower case."""
    text = _TEXT.sub(r"\1", answer)
    text = re.sub(r"\\[ ,;]|[{}]", lambda found: " " if found[0][0] == "\\" else "", text)
    text = " ".join(text.replace(", ", ",").split()).strip(".")
    return text.lower() if re.search(r"[^\W\d_]{2}", text) and "\\" not in text else text


def is_words(answer: str) -> bool:
    """Whether the answer is a word or a few, which are compared as text: "Monday", "no solution"."""
    text = plain_text(answer)
    return bool(_WORDS.fullmatch(text)) and _MATHEMATICS.isdisjoint(text.split())


def is_choice(answer: str) -> bool:
    """Whether the answer is the letter of a choice: "C", "(C)"."""
    return bool(re.fullmatch(r"\(?[A-J][).]*", plain_text(answer)))


def quick_equal(reference: str, answer: str) -> bool | None:
    """Whether two canonical answers are equal, if text, letters, or two plain numbers decide it; otherwise None."""
    if plain_text(reference) == plain_text(answer):
        return True
    if is_choice(reference):
        chosen = _CHOICE.match(_TEXT.sub(r"\1", answer))
        return None if chosen is None else chosen[1] in plain_text(reference)
    if is_words(reference):
        return False
    expected = normal_number(reference)
    if expected is not None and (measured := _ONE_LETTER_UNIT.fullmatch(answer)):
        answer = measured[1]
    actual = normal_number(answer)
    return None if expected is None or actual is None else expected == actual
