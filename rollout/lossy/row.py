"""A routed response in progress, and the requests that continue it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.engines.response import Response
from specrl.rollout.lossy.router import Step
from specrl.rollout.types import Request
from specrl.rollout.verify import Accepted


@dataclass(slots=True)
class RoutedRow(Response):
    """A response in progress. Log-probs are NaN while the policy has not read the token; `passes` are the policy's."""

    steps: list[Step] = field(default_factory=list)

    def request_after(self, text: Sequence[int], cap: int, stop_ids: frozenset[int] = frozenset()) -> Request:
        """What continues the kept steps and `text` with at most `cap` tokens."""
        done = [*self.tokens, *text]
        prompt = [*self.request.prompt, *done]
        return Request(prompt, self.request.key, cap, position=len(done), stop_ids=stop_ids)

    def keep(self, step: Step, eos_ids: frozenset[int]) -> int:
        """Appends a step and ends the response if necessary; returns how many of its tokens the draft wrote."""
        self.steps.append(step)
        drafted = len(step.tokens) if step.source == "draft" else 0
        self.passes -= 1  # `emit` counts one for each step, which may have taken more or none
        logprobs = step.policy_logprobs or [math.nan] * len(step.tokens)
        self.emit(Accepted(step.tokens, logprobs, behaviour=step.logprobs, drafted=drafted), eos_ids)
        return drafted


def follows(tokens: Sequence[int]) -> SuffixDrafter:
    """A drafter that proposes the text as long as it is followed."""
    return SuffixDrafter(PromptTexts(sources=("prefix",)), tokens)
