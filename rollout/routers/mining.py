"""AutoJudge's labels (arXiv 2504.20039): which draft tokens can stand without changing the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Text = list[int]


@dataclass(frozen=True, slots=True)
class Mined:
    """One mismatch of draft and policy, tried out."""

    row: int
    """Which prompt."""
    prefix: tuple[int, ...]
    """The response up to and including the draft token."""
    important: bool
    """The answer changed when the draft token stood."""


def mine(
    texts: Sequence[Text],
    propose: Callable[[dict[int, Text]], dict[int, Sequence[int | None]]],
    finish: Callable[[dict[int, Text]], dict[int, Text]],
    answer: Callable[[int, Text], object],
    eos_ids: frozenset[int],
    most: int = 64,
) -> list[Mined]:
    """Semi-greedy search: try each mismatch in turn, and go on from the text in which the unimportant ones stand.

    For every row, from left to right: the first position where the draft would write another token gets that token and
    the policy finishes the response. Same answer: unimportant, and the new text is the row's from now on. Else:
    important, and the text stays. Earlier important tokens are not tried again, hence semi-greedy.

    Args:
        texts: the policy's own greedy responses; their answers are what must not change.
        propose: the token a draft would write at each position of a row's text, given the text before it; None where it
            has none. A draft model, or the trajectory cache.
        finish: whole responses from prefixes, by the policy, greedily.
        answer: what counts as the answer of a row's response; None when it has none, which labels nothing.
        eos_ids: a mismatch at or behind the end of the text is not tried.
        most: mismatches tried per row.
    """
    wanted = {i: found for i, text in enumerate(texts) if (found := answer(i, text)) is not None}
    current, left, tried = {i: list(texts[i]) for i in wanted}, dict.fromkeys(wanted, 0), dict.fromkeys(wanted, 0)
    mined: list[Mined] = []
    while current:
        drafts = propose(current)
        prefixes: dict[int, Text] = {}
        for i in list(current):
            at = _first(current[i], drafts[i], left[i], eos_ids)
            if at is None or tried[i] >= most:
                del current[i]
                continue
            prefixes[i] = [*current[i][:at], drafts[i][at]]
            left[i], tried[i] = at + 1, tried[i] + 1
        for i, text in (finish(prefixes) if prefixes else {}).items():
            found = answer(i, text)
            if found is None:
                continue
            mined.append(Mined(i, tuple(prefixes[i]), found != wanted[i]))
            if found == wanted[i]:
                current[i] = text
    return mined


def _first(text: Text, draft: Sequence[int | None], left: int, eos_ids: frozenset[int]) -> int | None:
    """The first mismatch from `left` on; None at the end of the text."""
    for at in range(left, len(text)):
        if text[at] in eos_ids:
            return None
        if draft[at] is not None and draft[at] != text[at]:
            return at
    return None
