"""A row's text that is verified once, from its first token on, and the rule of routers for it."""

from __future__ import annotations

from collections.abc import Sequence

from specrl.rollout.drafting.draft import EMPTY, Draft
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.response import Response
from specrl.rollout.types import EngineStats
from specrl.rollout.verify import Accepted, TargetSamples, accept_exact, exact


class TextOnce(Drafting):
    """Drafts all of a row's text in its first pass, and nothing after that."""

    verifies_once = True

    def propose(self, rows: Sequence[Response], stats: EngineStats) -> list[Draft]:
        return [self.text(row) if row.drafting and not row.tokens else EMPTY for row in rows]

    def text(self, row: Response) -> Draft:
        """The row's text with its log-probs if there are any, as far as it fits."""
        tokens = self.guess(row, row.remaining)
        return Draft(tokens, row.guess.source, (row.request.draft_logprobs or ())[: len(tokens)])

    def learn(self, row: Response, draft: Draft, tokens: Sequence[int], drafted: int) -> None:
        row.drafting &= drafted == len(draft.tokens)  # nothing after the first rejection


class ReadOrVerify(TextOnce):
    """What an engine needs to be the policy of RoutedRollout: it reads some texts and verifies the others.

    A text with log-probs is read: it is the response, whatever the policy samples. `Completion.logprobs` are the
    policy's of these tokens, `reused` says where it samples the same token, and `own` is what it samples at the first
    token where it does not. A text without log-probs is verified exactly. Both come with a request, as its drafter's
    first proposal and `draft_logprobs`.
    """

    def learn(self, row: Response, draft: Draft, tokens: Sequence[int], drafted: int) -> None:
        if not draft.logprobs:
            super().learn(row, draft, tokens, drafted)

    def rule(self, key: int, draft: Draft, samples: TargetSamples) -> Accepted:
        """An AcceptanceRule."""
        if not draft.logprobs:
            return exact(key, draft, samples)
        agreed = accept_exact(samples.tokens, draft.tokens)
        differs = agreed < len(draft.tokens)
        return Accepted(
            tokens=draft.tokens,
            logprobs=samples.draft_logprobs[: len(draft.tokens)],
            behaviour=draft.logprobs,
            drafted=agreed,
            own=(samples.tokens[agreed], samples.logprobs[agreed]) if differs else None,
        )
