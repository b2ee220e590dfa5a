"""A response that is one of vLLM's requests. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specrl.rollout.drafting.budget import State
from specrl.rollout.drafting.draft import EMPTY, Draft
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.response import Response

BUG = "this is a bug in specrl, or a version of vLLM that it does not know"


@dataclass(slots=True, eq=False)
class VLLMRow(Response):
    """One response in the making."""

    sampling: SamplingParams = field(kw_only=True)
    draft: Draft = EMPTY
    """Proposed for the row's next step."""
    old_text: Draft = EMPTY
    """The one text that is verified once, by response position."""
    by_model: Sequence[int] = ()
    """What vLLM's draft model proposed for the next step, verified or not."""
    model_state: State = "start"
    """How much of that proposal was right."""

    def rest_of_text(self, most: int) -> Draft:
        """At most `most` tokens of the old text from the response's end on."""
        text = self.old_text if self.drafting else EMPTY
        part = slice(len(self.tokens), len(self.tokens) + most)
        return Draft(text.tokens[part], text.source, (text.logprobs or ())[part])
