"""What all flows share: rows in the making, and what decides about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specrl.rollout.drafting.draft import EMPTY, Draft
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.response import Response
from specrl.rollout.types import EngineStats
from specrl.rollout.verify import AcceptanceRule, exact

BUG = "this is a bug in specrl, or a version of vLLM that it does not know"


@dataclass(slots=True, eq=False)
class VLLMRow(Response):
    """One response in the making. Under the exact rule its columns but `tokens` are filled when it ends."""

    sampling: SamplingParams = field(kw_only=True)
    draft: Draft = EMPTY
    """What was proposed for its next step."""
    text: Draft = EMPTY
    """The one draft that the lenient rule verifies, by response position."""
    place: int = 0
    """Where `Told` has its first position."""


class LogprobBuffer:
    """What the steps of the exact rule told of the tokens of these rows.

    What does not stand is told again, so a step writes all that it drew. Memory is taken as rows grow.
    """

    def __init__(self, rows: Sequence[VLLMRow]):
        size = 0
        for row in rows:
            row.place, size = size, size + row.request.max_new_tokens
        self.logprobs, self.reused = np.empty(size, np.float32), np.empty(size, bool)

    def complete(self, row: VLLMRow) -> None:
        """Fills the columns of a row that has ended."""
        part = slice(row.place, row.place + len(row.tokens))
        row.logprobs, row.behaviour = self.logprobs[part].tolist(), self.logprobs[part].tolist()
        row.reused = self.reused[part].tolist()


@dataclass(kw_only=True)
class Rules:
    """How rows draft and what they accept."""

    rule: AcceptanceRule = exact
    drafting: Drafting
    weight_version: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    """Of the current rollout."""
