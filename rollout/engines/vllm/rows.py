"""What all flows share: rows in the making, and what decides about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from rollout.drafting.draft import EMPTY, Draft
from rollout.drafting.drafting import Drafting
from rollout.engines.base import Sampling
from rollout.engines.response import Response
from rollout.types import EngineStats
from rollout.verify import Rule, Stood, exact

BUG = "this is a bug in specrl, or a version of vLLM that it does not know"


@dataclass(slots=True)
class VLLMRow(Response):
    """One response in the making. While it goes on, what `unwritten` holds is missing from its columns."""

    sampling: Sampling = field(kw_only=True)
    draft: Draft = EMPTY
    """What was proposed for its next step."""
    text: Draft = EMPTY
    """The one draft that the lenient rule verifies, by response position."""
    unwritten: list[Sequence[float]] = field(default_factory=list)
    """Of each step that ended nothing the log-probs, where all tokens but the last are a draft's and the law is the
    policy's: nobody asks for columns before a row ends, and lists in Python take their time."""

    def emit(self, stood: Stood, eos_ids: frozenset[int]) -> int:
        """See Response.emit. Log-probs may also be an array."""
        tokens, count = stood.tokens, stood.drafted + 1
        goes_on = len(self.tokens) + count < self.request.max_new_tokens and eos_ids.isdisjoint(tokens)
        if goes_on and stood.behaviour is stood.logprobs and len(tokens) == count:
            self.tokens += tokens
            self.unwritten.append(stood.logprobs)
            return count
        self.write()
        own = np.asarray(stood.logprobs).tolist()
        law = own if stood.behaviour is stood.logprobs else stood.behaviour
        return Response.emit(self, Stood(tokens, own, law, stood.drafted), eos_ids)

    def write(self) -> None:
        """Completes the columns."""
        if self.unwritten:
            self.passes += len(self.unwritten)
            self.logprobs += np.concatenate(self.unwritten).tolist()
            self.reused += chain.from_iterable([True] * (len(own) - 1) + [False] for own in self.unwritten)
            self.unwritten.clear()
        self.behaviour += self.logprobs[len(self.behaviour) :]


@dataclass(kw_only=True)
class Rules:
    """How rows draft and what they accept."""

    rule: Rule = exact
    drafting: Drafting
    weight_version: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    """Of the current rollout."""
