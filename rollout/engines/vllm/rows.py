"""What all flows share: rows in the making, and what decides about them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.drafting.draft import EMPTY, Draft
from rollout.drafting.drafting import Drafting
from rollout.engines.base import Sampling
from rollout.engines.response import Response
from rollout.types import EngineStats
from rollout.verify import Rule, Stood, exact

BUG = "this is a bug in specrl, or a version of vLLM that it does not know"

_REUSED = [[True] * n + [False] for n in range(128)]  # of a step in which n draft tokens stood, vLLM's most


@dataclass(slots=True)
class VLLMRow(Response):
    """One response in the making. While it goes on, `behaviour` may lack what equals `logprobs`."""

    sampling: Sampling = field(kw_only=True)
    draft: Draft = EMPTY
    """What was proposed for its next step."""
    text: Draft = EMPTY
    """The one draft that the lenient rule verifies, by response position."""

    def emit(self, stood: Stood, eos_ids: frozenset[int]) -> int:
        """See Response.emit; steps that end nothing, almost all, take a third of its time."""
        tokens, logprobs, count = stood.tokens, stood.logprobs, stood.drafted + 1
        goes_on = len(self.tokens) + count < self.request.max_new_tokens and eos_ids.isdisjoint(tokens)
        if goes_on and stood.behaviour is logprobs and len(tokens) == count:
            self.tokens += tokens
            self.logprobs += logprobs
            self.reused += _REUSED[stood.drafted]
            self.passes += 1
            return count
        self.behaviour += self.logprobs[len(self.behaviour) :]
        return Response.emit(self, stood, eos_ids)


@dataclass(kw_only=True)
class Rules:
    """How rows draft and what they accept."""

    rule: Rule = exact
    drafting: Drafting
    weight_version: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    """Of the current rollout."""
