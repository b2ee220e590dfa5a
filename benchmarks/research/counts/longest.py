"""SAM Decoding's longest match (arXiv 2411.10666) against the longest of 8, 4 or 2 tokens, as the index searches.

Of each problem some responses are known and another one is replayed, by the drafter of `rollout.sources`: it follows a
text while it agrees, and searches after a mismatch. Both ways take the latest of equally long matches. "Every pass"
searches before each pass instead, as `selfspec`'s places do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.research.counts.record import Record
from benchmarks.research.selfspec.places import Texts, walked
from benchmarks.research.selfspec.texts import own_groups
from specrl.rollout.drafting.ngrams import LENGTHS, Occurrence
from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter, find, unseen

PROBLEMS, GROUP = 96, 9
KNOWN, DRAFTS = (1, 8), (4, 16)
LONGEST = 32  # tokens of a match that are compared
SEARCHED = {"8, 4, 2": LENGTHS, "longest": range(LONGEST, LENGTHS[-1] - 1, -1)}
Search = Callable[[PromptTexts, Sequence[int]], list[Occurrence]]


def measure(record: Record) -> dict:
    """Tokens a pass of both searches, and how much more the longest match brings."""
    groups = own_groups(record.policy, record.tokenizer, PROBLEMS, GROUP)
    return {"problems": PROBLEMS, "lines": list(lines(groups))}


def lines(groups: Sequence[Texts]) -> Iterator[dict]:
    for known in KNOWN:
        for most in DRAFTS:
            line = {"known": known, "draft": most}
            for name, search in {"8, 4, 2": latest, "longest": longest}.items():
                line[name] = tokens_a_pass(groups, lambda g, s=search, k=known, m=most: followed(g[-1], g[:k], m, s))
            line["gain"] = round(line["longest"] / line["8, 4, 2"] - 1, 4)
            for name, lengths in SEARCHED.items():
                line[f"every pass, {name}"] = tokens_a_pass(
                    groups, lambda g, n=lengths, k=known, m=most: walked(g[-1], g[:k], m, counted=False, lengths=n)
                )
            line["every pass, gain"] = round(line["every pass, longest"] / line["every pass, 8, 4, 2"] - 1, 4)
            yield line


def tokens_a_pass(groups: Sequence[Texts], passes: Callable[[Texts], int]) -> float:
    return round(sum(len(group[-1]) for group in groups) / sum(map(passes, groups)), 4)


def followed(text: Sequence[int], known: Texts, most: int, search: Search) -> int:
    """Passes that a text takes with drafts of at most `most` tokens. Args: known: the latest last."""
    texts = PromptTexts([*reversed(known)], ("earlier", "group"))
    drafter, at, passes = SuffixDrafter(texts), 0, 0
    while at < len(text):
        if not drafter.observe(text[:at]):
            drafter.switch_source(text[:at], search(texts, text[:at]), unseen)
        draft = drafter.continuation(at, most)
        accepted = next((i for i, token in enumerate(draft) if text[at + i : at + i + 1] != [token]), len(draft))
        at += accepted + 1
        passes += 1
    return passes


def latest(texts: PromptTexts, tokens: Sequence[int]) -> list[Occurrence]:
    """As the index finds them."""
    return find([texts], [tokens])[0]


def longest(texts: PromptTexts, tokens: Sequence[int]) -> list[Occurrence]:
    """Of each source the latest of the places that match longest, however long."""
    best: dict[str, Occurrence] = {}
    for number in [*reversed(range(texts.stored)), *range(texts.stored, len(texts.texts))]:
        text, source = texts.texts[number], texts.source(number)
        for at in range(LENGTHS[-1], len(text)):
            length = matching(text, at, tokens)
            if length >= max(LENGTHS[-1], best.get(source, (0, 0, 0))[2]):
                best[source] = number, at, length
    return [*best.values()]


def matching(text: Sequence[int], at: int, tokens: Sequence[int]) -> int:
    """How many of the last tokens precede this place."""
    most = min(LONGEST, at, len(tokens))
    return next((n for n in range(most) if text[at - n - 1] != tokens[-n - 1]), most)
