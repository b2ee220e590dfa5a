"""Where a text gives its answer: after its thoughts, in a box, after `####`, or in its last line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specrl.reward.spelling import MAX_ANSWER_CHARS, SAYS_SO, bare, canonical

_BOXES = re.compile(r"\\\\|\\(?:boxed|fbox)(?:\s{0,3}\{|\s{1,3}(?P<bare>[+-]?\w[\w.,/]{0,30}))|\\[{}]|[{}]")
# What may be between the boxes of one answer: "\boxed{3}, $x = \boxed{5}$ and \boxed{11}".
_BETWEEN_BOXES = re.compile(
    r"(?=.*(?:[,;]|and|or))"
    r"(?:[\s$,;&~]|\\[,;:! ()\[\]]|\\q?quad|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b|[a-zA-Z]\w?\s*=)+",
    re.DOTALL,
)
_HASHES = re.compile(r"(?<!#)####(?!#)")
# A line after #### that is a value, not a heading such as "Check", "Step 2" or "3. Check".
_VALUE = re.compile(
    r"(?!\d+[.):]\s+[A-Za-z])(?:[-+(\[{\s]*(?:[$€£¥₹]\s?)?[-+]?[\d.]*\d|\\|[([{]*[A-Za-z]\w?\s*(?:=|[.)]*$))"
)
_IS = re.compile(r"\b(?:is|are)\b[\s:]*", re.IGNORECASE)


def final_text(prompt: str, completion: str, tags: Sequence[str]) -> str:
    """The completion without its thoughts: what follows the last closing tag, nothing while a thought is unfinished.

    Args:
        prompt: a chat template may end it with the opening tag.
        tags: the opening and the closing tag; empty if the model writes no thoughts.
    """
    if not tags:
        return completion
    opening, closing = tags
    _, closed, rest = completion.rpartition(closing)
    unfinished = opening in rest or (not closed and prompt.rstrip().endswith(opening))
    return "" if unfinished else rest


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""(start, end, content) of the complete `\boxed{...}`, `\fbox{...}` and `\boxed 6`, the outer one if nested."""
    found: list[tuple[int, int, str]] = []
    opened: list[re.Match[str]] = []
    for token in _BOXES.finditer(text):
        if token["bare"]:
            found.append((token.start(), token.end(), token["bare"].rstrip(".,")))
        elif token[0].endswith("{") and token[0] != r"\{":
            opened.append(token)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start[0] != "{":
                while found and found[-1][0] > start.start():
                    found.pop()
                found.append((start.start(), token.end(), text[start.end() : token.start()]))
    return found


def marked_answer(text: str) -> str | None:
    r"""The answer that a text marks as such, or None.

    It is the content of the last `\boxed{...}`; several boxes with only commas, "and" or "or" between them are one
    answer. In a text without a box it is what follows the last `####`, if that is a value and no heading.
    """
    found = boxes(text)
    if found:
        group = [found[-1]]
        for box in reversed(found[:-1]):
            between = text[box[1] : group[0][0]]
            if len(between) > 40 or not _BETWEEN_BOXES.fullmatch(between):
                break
            group.insert(0, box)
        return ", ".join(dict.fromkeys(content.strip() for _, _, content in group))
    for mark in reversed(list(_HASHES.finditer(text))):
        end = text.find("\n", mark.end())
        line = text[mark.end() : end if end >= 0 else len(text)].strip()
        if len(line) > MAX_ANSWER_CHARS or _VALUE.match(bare(line)):
            return line
    return None


def said_answer(text: str) -> str:
    """What the last line of a text without a mark gives as its answer: in bold, after "is" or "answer:", or all."""
    line = text.rstrip().rpartition("\n")[2][-MAX_ANSWER_CHARS:].lstrip("# ")
    said = _IS.split(SAYS_SO.split(line)[-1])[-1]
    bold = re.findall(r"\*\*([^*]+)\*\*", said)
    return canonical(bold[-1] if bold else said)
