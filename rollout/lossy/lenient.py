"""SPEC-RL as published (arXiv 2509.23232): the old text of a sample is verified once, by a likelihood ratio. Biased."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specrl.rollout.checks import check
from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.draft import EMPTY, Draft
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.response import Response
from specrl.rollout.noise import uniform
from specrl.rollout.types import EngineStats, Request, RolloutError
from specrl.rollout.verify import AcceptanceRule, Accepted, TargetSamples, exact

_KEY = 0x5851F42D4C957F2D  # separates the acceptance uniforms from the Gumbel noise of the same key
NO_WEIGHT = math.inf
"""Behaviour log-prob of the token drawn at a rejection, so that its weight p / behaviour is 0: see `kept`."""


def lenient(lenience: float) -> AcceptanceRule:
    """SPEC-RL as published: see `accept_lenient`. Drafts must bring the log-probs of the law that drew them.

    Raises:
        RolloutError: a lenience that accepts nothing or is no number.
    """
    check(RolloutConfig(acceptance="lenient", lenience=lenience))

    def rule(key: int, draft: Draft, drawn: TargetSamples) -> Accepted:
        if not draft.tokens:
            return exact(key, draft, drawn)
        k = len(draft.tokens)
        new, old = (
            torch.tensor(logprobs, dtype=torch.float64, device="cpu")
            for logprobs in (drawn.text_logprobs[:k], draft.logprobs)
        )
        at = torch.arange(drawn.at, drawn.at + k)
        u = uniform(torch.tensor(key ^ _KEY).expand(k), at)
        n = accept_lenient(new, old, u, lenience)
        own = drawn.logprobs[n : n + 1]
        return Accepted(
            [*draft.tokens[:n], *drawn.draws[n : n + 1]],
            [*drawn.text_logprobs[:n], *own],
            [*kept(new[:n], old[:n], lenience).tolist(), *(own if n == k else [NO_WEIGHT] * len(own))],
            n,
        )

    return rule


def accept_lenient(logp_new: Tensor, logp_old: Tensor, u: Tensor, lenience: float) -> int:
    """Accepted prefix under SPEC-RL's published rule: token i stands with probability min(1, l * p_new / p_old).

    Algorithm 1 of SPEC-RL (arXiv 2509.23232). After the first rejection the caller samples from p_new, not from the
    residual, so the output is biased towards the old policy even at l = 1; see docs/guarantees.md.

    Args: logp_new, logp_old float [K], log-probs of the drafted tokens under the current policy and under the law that
    produced them, both after the same temperature, top-k and top-p; u uniforms [K], fresh on every visit.
    """
    accept = u.log() <= torch.tensor(lenience, dtype=torch.float64).log() + logp_new.double() - logp_old.double()
    return int(accept.long().cumprod(0).sum())


def kept(logp_new: Tensor, logp_old: Tensor, lenience: float) -> Tensor:
    """Log of a = min(p_old, l * p_new): the probability that a token is drafted and then accepted. Shapes are equal.

    A verified position samples x with a(x) by acceptance and with (1 - sum a) p_new(x) after a rejection. sum a is not
    known, as p_old is stored for the text's own tokens only. The weights p_new / a on accepted tokens and 0 on the
    token drawn at the rejection need no sum, and no others without it have p_new as the mean of weighted samples: by
    token, and as a product over a response.

    Args: as in `accept_lenient`, of accepted tokens.
    """
    return torch.minimum(logp_old, logp_new + math.log(lenience))


class VerifyOldTextOnce(Drafting):
    """The sample's old text, whole, in the row's first pass, and nothing after that."""

    whole = True

    def begin(self, requests: Sequence[Request]) -> None:
        if any(request.drafter and request.draft_logprobs is None for request in requests):
            raise RolloutError("the lenient rule needs the stored log-probs of every draft; the cache holds none")
        super().begin(requests)

    def propose(self, rows: Sequence[Response], stats: EngineStats) -> list[Draft]:
        return [self.text(row) if row.drafting and not row.tokens else EMPTY for row in rows]

    def text(self, row: Response) -> Draft:
        """All of the row's old text that fits."""
        tokens = self.guess(row, row.room)
        return Draft(tokens, row.guess.source, (row.request.draft_logprobs or ())[: len(tokens)])

    def learn(
        self, row: Response, draft: Draft, tokens: Sequence[int], drafted: int, behind: Sequence[int] = ()
    ) -> None:
        row.drafting &= drafted == len(draft.tokens)  # nothing after the first rejection
