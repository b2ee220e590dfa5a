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

WAITING = 256
"""Steps of a row whose log-probs may wait: each keeps the arrays of all rows of its step."""
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
    """Log-probs of each step that was taken and ended nothing: nobody asks for columns before a row ends."""

    def take(self, tokens: list[int], logprobs: Sequence[float], eos_ids: frozenset[int]) -> int:
        """As `emit`, for a step of the policy's own law of whose tokens all but the last are a draft's."""
        count = len(tokens)
        if len(self.tokens) + count < self.request.max_new_tokens and eos_ids.isdisjoint(tokens):
            self.tokens += tokens
            self.unwritten.append(logprobs)
            if len(self.unwritten) == WAITING:
                self.write()
            return count
        own = np.asarray(logprobs).tolist()
        return self.emit(Stood(tokens, own, own, count - 1), eos_ids)

    def emit(self, stood: Stood, eos_ids: frozenset[int]) -> int:
        """See Response.emit."""
        self.write()
        return Response.emit(self, stood, eos_ids)

    def write(self) -> None:
        """Completes the columns."""
        if self.unwritten:
            own = np.concatenate(self.unwritten).tolist()
            self.logprobs += own
            self.behaviour += own
            self.reused += chain.from_iterable([True] * (len(step) - 1) + [False] for step in self.unwritten)
            self.passes += len(self.unwritten)
            self.unwritten.clear()


@dataclass(kw_only=True)
class Rules:
    """How rows draft and what they accept."""

    rule: Rule = exact
    drafting: Drafting
    weight_version: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    """Of the current rollout."""
