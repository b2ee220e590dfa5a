"""vLLM's draft model beside the rows' texts: which of the two drafts a row verifies, and how many tokens are proposed.

The model proposes for all rows at the end of a step, on the device. Each row then verifies the draft of its texts or
the model's, whichever promises more accepted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specrl.rollout.drafting.budget import AcceptanceBucket, State
from specrl.rollout.drafting.cost import emitted
from specrl.rollout.drafting.draft import Draft
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.vllm.logits import LogitsBudget
from specrl.rollout.engines.vllm.planned_v2 import MODEL_TOKENS
from specrl.rollout.engines.vllm.row import VLLMRow
from specrl.rollout.verify import accept_exact


class Offer(NamedTuple):
    """What a row would gain from the draft model."""

    by_text: float
    """Tokens that it is expected to emit in a step without the model's draft."""
    chance: float
    """Acceptance probability of that draft."""
    most: int
    """Most tokens of that draft."""


@dataclass(kw_only=True)
class ModelDrafts:
    """The draft model's part of the drafts of a step.

    Args:
        share: weights that a pass of the model reads, as a share of those that a pass of the policy reads.
        draft_tokens: most draft tokens of a row in one step.
        budget: draft tokens of all rows in one step.
    """

    share: float
    drafting: Drafting
    draft_tokens: int
    budget: LogitsBudget
    tokens: int = 1
    """What it proposes for each row in the next step, if no row begins in it."""

    def learn(self, row: VLLMRow, tokens: Sequence[int]) -> None:
        """Observes how much of its last proposal was right, also where the text's draft was verified."""
        proposed = row.by_model[: len(tokens)]
        if not proposed:
            return
        accepted = accept_exact(tokens, proposed)
        self.drafting.budget.observe_draft(_bucket(row), len(proposed), accepted)
        state: State = "agreeing" if accepted == len(proposed) else "diverged" if accepted else "lost"
        row.model_state = state

    def replace(self, rows: Sequence[VLLMRow | None], proposed: Sequence[Sequence[int]]) -> None:
        """Replaces the drafts of rows to which it promises more accepted tokens than their texts do.

        Args: proposed: its tokens for each of `rows`.
        """
        budget = self.drafting.budget
        pairs = [(row, tokens) for row, tokens in zip(rows, proposed, strict=True) if row]
        plan = budget.plan([_bucket(row) if row.drafting else None for row, _ in pairs])
        longest = self.budget.share(len(pairs), len(pairs), MODEL_TOKENS)
        offers = []
        for row, tokens in pairs:
            if not row.drafting:
                offers.append(Offer(1.0, 0.0, 0))
                continue
            row.by_model = [*tokens[: max(0, min(MODEL_TOKENS, row.remaining - 1))]]
            most = min(plan.lengths[_bucket(row)], longest)
            offers.append(self._offer(row, len(row.draft.tokens), most))
            length = min(most, len(row.by_model))
            by_text = budget.gain(row.bucket, len(row.draft.tokens), plan.needed)
            if length and budget.gain(_bucket(row), length, plan.needed) > by_text:
                row.draft = Draft(row.by_model[:length], "model")
        self.tokens = self._worth_proposing(offers, sum(len(row.draft.tokens) for row, _ in pairs))

    def proposes(self, rows: Sequence[VLLMRow | None]) -> int:
        """Tokens that it proposes for each row at the end of a step of these rows.

        None where no row drafts: plain rows, which speed is compared with, do not pay for the model.
        """
        drafting = [row for row in rows if row and row.drafting]
        if not drafting:
            return 0
        beginning = [row for row in drafting if not row.tokens]
        for row in beginning:
            self.drafting.guess(row, min(self.draft_tokens, row.remaining - 1))
        offers = [self._offer(row, len(row.guess.tokens), MODEL_TOKENS) for row in beginning]
        most = min(MODEL_TOKENS, self.draft_tokens)
        return min(most, max(self.tokens, self._worth_proposing(offers, 0)))

    def _offer(self, row: VLLMRow, by_text: int, most: int) -> Offer:
        """Args: by_text: draft tokens from the row's texts; most: of the model's tokens."""
        budget = self.drafting.budget
        return Offer(emitted(budget.acceptance(row.bucket), by_text), budget.acceptance(_bucket(row)), most)

    def _worth_proposing(self, offers: Sequence[Offer], drafted: int) -> int:
        """See `worth_proposing`. Args: drafted: draft tokens in the step after which the model proposes."""
        budget = self.drafting.budget
        if budget.window and any(offer.most for offer in offers):
            return MODEL_TOKENS
        reading = budget.cost()[0]
        fixed, token_s = budget.cost(len(offers))
        return worth_proposing(offers, self.share * reading / (fixed + token_s * (len(offers) + drafted)))


def worth_proposing(offers: Sequence[Offer], price: float) -> int:
    """Tokens that a draft model should propose for all rows, 1 to MODEL_TOKENS: with them a token of a row, on the mean
    of the rows, takes the least time. The first one is free, as the model has to read what was emitted.

    Args: price: of a pass of the model, in steps.
    """
    if not offers:
        return 1
    by_text, chances, most = np.array(offers).T[:, :, None]
    counts = np.arange(1, MODEL_TOKENS + 1)
    by_model = 1 + np.where(counts <= most, chances**counts, 0.0).cumsum(1)
    steps = (1 / np.maximum(by_text, by_model)).sum(0)
    return int(counts[(steps * (1 + price * (counts - 1))).argmin()])


def _bucket(row: VLLMRow) -> AcceptanceBucket:
    return row.model_state, "model"
