"""Drafts: tokens that a row carries in its next pass. They decide what a pass costs, never what it samples."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index

import numpy as np

from specrl.rollout.drafting.suffix import SuffixDrafter, Worth, propose, unseen
from specrl.rollout.types import Drafter, RolloutError


@dataclass(slots=True, unsafe_hash=True)  # never changed; frozen ones take three times as long to make
class Draft:
    """Guesses of a row's next tokens."""

    tokens: Sequence[int] = ()
    source: str = ""
    """Where they come from: a drafter's `source`, `contexts` or `model`."""
    logprobs: Sequence[float] | None = None
    """Of the tokens, under the distribution that sampled them; None where no rule needs them."""

    def first(self, count: int) -> Draft:
        """Its first `count` tokens where it has more, for rules that need no log-probs."""
        return Draft(list(self.tokens[:count]), self.source) if len(self.tokens) > count else self


EMPTY = Draft()


class DrafterFault(RolloutError):
    """A drafter raised, or proposed something else than token ids. Its row goes on without drafts of its own."""


def ask(drafter: Drafter, text: Sequence[int], limit: int, vocab: int) -> Draft:
    """At most `limit` tokens that may follow the response `text`, up to the first id that does not exist.

    Raises:
        DrafterFault: the drafter fails.
    """
    return Draft(known(_ids(drafter, show(drafter, text, limit), limit), vocab), getattr(drafter, "source", "custom"))


def show(drafter: Drafter, text: Sequence[int], limit: int) -> Iterable[int]:
    """What a drafter proposes after the response `text`.

    Raises:
        DrafterFault: it raises.
    """
    try:
        return drafter.propose(tuple(text), limit)  # a copy, as a drafter may change it
    except Exception as error:  # of anybody's code
        raise DrafterFault(
            f"the drafter {type(drafter).__name__} raised {type(error).__name__}: {error!s:.200}"
        ) from error


def _raise(row: int, fault: DrafterFault) -> None:
    raise fault


def ask_all(
    drafters: Sequence[Drafter | None],
    texts: Sequence[Sequence[int]],
    limits: Sequence[int],
    vocab: int,
    worth: Worth = unseen,
    failed: Callable[[int, DrafterFault], None] = _raise,
) -> list[Draft]:
    """`ask` for each row with a drafter and a limit above 0. Suffix drafters are asked together.

    Args:
        worth: by which they choose between texts.
        failed: called with a row whose drafter fails, and the fault; the row has no draft.
    """
    drafts = [EMPTY] * len(drafters)
    together: dict[int, SuffixDrafter] = {}
    for i, (drafter, text, limit) in enumerate(zip(drafters, texts, limits, strict=True)):
        if type(drafter) is SuffixDrafter and limit > 0:
            together[i] = drafter
        elif drafter and limit > 0:
            try:
                drafts[i] = ask(drafter, text, limit, vocab)
            except DrafterFault as fault:
                failed(i, fault)
    proposed = propose([*together.values()], [texts[i] for i in together], [limits[i] for i in together], worth)
    exist = _exist(proposed, vocab)
    for (i, suffix_drafter), tokens in zip(together.items(), proposed, strict=True):
        drafts[i] = Draft(tokens if exist else known(tokens, vocab), suffix_drafter.source)
    return drafts


def _exist(texts: Iterable[array[int]], vocab: int) -> bool:
    """Whether all tokens are ids below `vocab`."""
    ids = array("I")
    for tokens in texts:
        ids += tokens
    return not ids or np.frombuffer(ids, np.uint32).max() < vocab


def known(tokens: Sequence[int], vocab: int) -> list[int]:
    """The tokens before the first id that does not exist."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab):
        return list(tokens)
    return list(tokens[: next((i for i, t in enumerate(tokens) if not 0 <= t < vocab), len(tokens))])


def _ids(drafter: Drafter, proposed: Iterable[int], limit: int) -> list[int]:
    try:
        return [index(token) for token in islice(proposed, limit)]
    except Exception as error:  # of anybody's code, as a generator runs here
        raise DrafterFault(
            f"the drafter {type(drafter).__name__} proposed {proposed!r:.80}, which are no token ids: {error!s:.200}. "
            "Return a sequence of ints, an empty one for no guess"
        ) from error
