"""What both model runners share: rows in the making, and applying the acceptance rule."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.drafting.draft import EMPTY, Draft
from rollout.drafting.drafting import Drafting
from rollout.engines.base import Sampling
from rollout.engines.response import Response
from rollout.types import EngineStats
from rollout.verify import Drawn, Rule, exact

BUG = "this is a bug in specrl, or a version of vLLM that it does not know"


@dataclass(slots=True)
class VLLMRow(Response):
    """One response in the making."""

    sampling: Sampling = field(kw_only=True)
    draft: Draft = EMPTY
    """What was proposed for its next step."""
    text: Draft = EMPTY
    """V1: the one draft that the lenient rule verifies, by response position."""
    riding: list[int] = field(default_factory=list)
    """V2: what vLLM was given of the draft."""
    tested: Draft = EMPTY
    """V2: what is decided about in this step."""


@dataclass(kw_only=True)
class Rules:
    """How rows draft and what they accept."""

    rule: Rule = exact
    drafting: Drafting
    weight_version: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    """Of the current rollout."""

    def settle(self, row: VLLMRow, draft: Draft, drawn: Drawn) -> int:
        """Decides about a draft and emits; returns the number of tokens emitted.

        Args: drawn: at the positions of the draft and, where it was drawn, the one after.
        """
        stood = self.rule(row.request.key, draft, drawn)
        emitted = row.emit(stood, row.sampling.eos_ids)
        self.stats.count(draft.source, len(draft.tokens), min(stood.drafted, emitted))
        self.drafting.learn(row, draft, stood)
        return emitted
