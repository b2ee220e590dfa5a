"""Drafts: tokens of a row that the next pass verifies. They affect the cost of a pass, never the sampled tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index

import numpy as np

from specrl.rollout.drafting.suffix import SuffixDrafter, Worth, propose, unseen
from specrl.rollout.types import Drafter


@dataclass(slots=True, unsafe_hash=True)  # never modified; a frozen class takes three times as long to construct
class Draft:
    """Predicted next tokens of a row."""

    tokens: Sequence[int] = ()
    source: str = ""
    """A drafter's `source`, or `model`."""
    logprobs: Sequence[float] | None = None
    """Of the tokens, under the distribution that sampled them; None if the acceptance rule does not need them."""

    def first(self, count: int) -> Draft:
        """The draft, truncated to `count` tokens without log-probs if it is longer."""
        return Draft(list(self.tokens[:count]), self.source) if len(self.tokens) > count else self


EMPTY = Draft()


def ask(drafter: Drafter, text: Sequence[int], limit: int, vocab: int) -> Draft:
    """A draft of at most `limit` tokens after the response `text`, up to the first invalid token id.

    Raises what the drafter raises, and TypeError if it proposes something else than token ids.
    """
    proposed = drafter.propose(tuple(text), limit)  # a copy, which the drafter may modify
    tokens = [index(token) for token in islice(proposed, limit)]
    return Draft(known(tokens, vocab), getattr(drafter, "source", "custom"))


def ask_all(
    drafters: Sequence[Drafter | None],
    texts: Sequence[Sequence[int]],
    limits: Sequence[int],
    vocab: int,
    worth: Worth = unseen,
) -> list[Draft]:
    """Calls `ask` for each row with a drafter and a positive limit. Suffix drafters are called in one batch.

    Args: worth: the acceptance estimate by which suffix drafters choose between texts.
    """
    drafts = [EMPTY] * len(drafters)
    together: dict[int, SuffixDrafter] = {}
    for i, (drafter, text, limit) in enumerate(zip(drafters, texts, limits, strict=True)):
        if type(drafter) is SuffixDrafter and limit > 0:
            together[i] = drafter
        elif drafter and limit > 0:
            drafts[i] = ask(drafter, text, limit, vocab)
    proposed = propose([*together.values()], [texts[i] for i in together], [limits[i] for i in together], worth)
    exist = _exist(proposed, vocab)
    for (i, suffix_drafter), tokens in zip(together.items(), proposed, strict=True):
        drafts[i] = Draft(tokens if exist else known(tokens, vocab), suffix_drafter.source)
    return drafts


def _exist(texts: Iterable[array[int]], vocab: int) -> bool:
    """Whether all token ids are below `vocab`."""
    ids = array("I")
    for tokens in texts:
        ids += tokens
    return not ids or np.frombuffer(ids, np.uint32).max() < vocab


def known(tokens: Sequence[int], vocab: int) -> list[int]:
    """The tokens before the first invalid id."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab):
        return list(tokens)
    return list(tokens[: next((i for i, t in enumerate(tokens) if not 0 <= t < vocab), len(tokens))])
