"""Where the last tokens of a response occur in several texts: the most recent one, or the most frequent continuation.

SAM decoding breaks ties between equally long matches by counts; the index of this package keeps the most recent match.
Each problem has a group of responses: all but one are known, and the last is replayed. Where the longest of `LENGTHS`
tokens that end it so far occurs in the known ones or in itself, what follows there is the draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from benchmarks.research.selfspec.texts import own_groups
from specrl.results import tables
from specrl.rollout.drafting.ngrams import LENGTHS

GROUP = 9  # eight are known
DRAFTS = (1, 4, 16)
Texts = Sequence[Sequence[int]]


def measure(policy, tokenizer, problems: int, console: Console) -> dict:
    """Tokens a pass with drafts from either place, over all walked texts."""
    groups, lines = own_groups(policy, tokenizer, problems, GROUP), []
    for known in (1, GROUP - 1):
        for length in DRAFTS:
            for counted in (False, True):
                passes = sum(walked(texts[-1], texts[:known], length, counted) for texts in groups)
                tokens = sum(len(texts[-1]) for texts in groups)
                chosen = "most frequent" if counted else "most recent"
                lines.append(
                    {"known": known, "draft": length, "place": chosen, "tokens per pass": round(tokens / passes, 4)}
                )
    rows = [tuple(map(str, line.values())) for line in lines]
    tables.show(console, "Of several places of the longest suffix", tuple(lines[0]), rows)
    return {"problems": problems, "lines": lines}


def walked(text: Sequence[int], known: Texts, length: int, counted: bool, lengths: Sequence[int] = LENGTHS) -> int:
    """Passes that a text takes with drafts of at most `length` tokens. Args: lengths: of matches, longest first."""
    places, at, passes = Places(known, lengths), 0, 0
    while at < len(text):
        draft = places.draft(text[:at], length, counted)
        accepted = next((i for i, token in enumerate(draft) if text[at + i : at + i + 1] != [token]), len(draft))
        at, passes = at + accepted + 1, passes + 1
    return passes


class Places:
    """Where n-grams of these lengths, longest first, occur in some texts, the latest last."""

    def __init__(self, texts: Texts, lengths: Sequence[int] = LENGTHS):
        self._texts, self._own, self._lengths = [*texts], list[int](), lengths
        self._found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for number, text in enumerate(texts):
            self._add(number, text, 0)
        self._texts.append(self._own)

    def _add(self, number: int, text: Sequence[int], since: int) -> None:
        for end in range(since + 1, len(text) + 1):
            for n in (n for n in self._lengths if n <= end):
                self._found.setdefault(tuple(text[end - n : end]), []).append((number, end))

    def draft(self, text: Sequence[int], length: int, counted: bool) -> list[int]:
        """What follows the longest suffix of `text`, which has grown since the last call.

        Args: counted: at the latest of the places that have the most frequent next token; else at the latest.
        """
        before, self._own[:] = len(self._own), text
        self._add(len(self._texts) - 1, text, before)
        suffixes = (tuple(text[-n:]) for n in self._lengths if n <= len(text))
        places = next((found for suffix in suffixes if (found := self._going_on(suffix))), [])
        if not places:
            return []
        if counted:
            tokens = Counter(self._texts[number][at] for number, at in reversed(places))
            most = tokens.most_common(1)[0][0]
            places = [(number, at) for number, at in places if self._texts[number][at] == most]
        number, at = places[-1]
        return list(self._texts[number][at : at + length])

    def _going_on(self, suffix: tuple[int, ...]) -> list[tuple[int, int]]:
        return [(number, at) for number, at in self._found.get(suffix, ()) if at < len(self._texts[number])]
