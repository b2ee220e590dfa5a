"""SPEC-RL as published (arXiv 2509.23232): a sample's old text is verified once, by a likelihood ratio. Biased."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specrl.rollout.checks import check
from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.draft import Draft
from specrl.rollout.lossy.text import TextOnce
from specrl.rollout.noise import uniform
from specrl.rollout.types import Request, RolloutError
from specrl.rollout.verify import AcceptanceRule, Accepted, TargetSamples, exact

_KEY = 0x5851F42D4C957F2D  # separates the acceptance uniforms from the Gumbel noise of the same key
NO_WEIGHT = math.inf
"""Behaviour log-prob of the token sampled at a rejection, so that its weight p / behaviour is 0: see `kept`."""


def lenient(lenience: float) -> AcceptanceRule:
    """SPEC-RL's rule (see `accept_lenient`), for drafts with the log-probs under which they were sampled.

    Raises:
        RolloutError: a lenience that accepts nothing or is not a number.
    """
    check(RolloutConfig(acceptance="lenient", lenience=lenience))

    def rule(key: int, draft: Draft, samples: TargetSamples) -> Accepted:
        if not draft.tokens:
            return exact(key, draft, samples)
        k = len(draft.tokens)
        new = torch.tensor(samples.draft_logprobs[:k], dtype=torch.float64, device="cpu")
        old = torch.tensor(draft.logprobs, dtype=torch.float64, device="cpu")
        positions = torch.arange(samples.position, samples.position + k)
        u = uniform(torch.tensor(key ^ _KEY).expand(k), positions)
        n = accept_lenient(new, old, u, lenience)
        sampled = samples.logprobs[n : n + 1]
        behaviour = sampled if n == k else [NO_WEIGHT] * len(sampled)
        return Accepted(
            tokens=[*draft.tokens[:n], *samples.tokens[n : n + 1]],
            logprobs=[*samples.draft_logprobs[:n], *sampled],
            behaviour=[*kept(new[:n], old[:n], lenience).tolist(), *behaviour],
            drafted=n,
        )

    return rule


def accept_lenient(logp_new: Tensor, logp_old: Tensor, u: Tensor, lenience: float) -> int:
    """Accepted prefix under SPEC-RL's published rule: token i is accepted with probability min(1, l * p_new / p_old).

    Algorithm 1 of SPEC-RL (arXiv 2509.23232). After the first rejection the caller samples from p_new, not from the
    residual, so the output is biased towards the old policy even at l = 1; see docs/lossy.md.

    Args:
        logp_new, logp_old: log-probs of the drafted tokens under the current policy and under the one that sampled
            them, after the same temperature, top-k and top-p; float [K].
        u: uniforms [K], new on every visit.
    """
    accept = u.log() <= torch.tensor(lenience, dtype=torch.float64).log() + logp_new.double() - logp_old.double()
    return int(accept.long().cumprod(0).sum())


def kept(logp_new: Tensor, logp_old: Tensor, lenience: float) -> Tensor:
    """Log of a = min(p_old, l * p_new): the probability that a token is drafted and then accepted. Shapes are equal.

    A verified position samples x with a(x) by acceptance and with (1 - sum a) p_new(x) after a rejection. sum a is not
    known, as p_old is stored for the sampled tokens only. The weights p_new / a on accepted tokens and 0 on the token
    sampled at the rejection do not need it, and are the only such weights whose weighted samples have the mean p_new,
    by token and as a product over a response.

    Args: as in `accept_lenient`, of accepted tokens.
    """
    return torch.minimum(logp_old, logp_new + math.log(lenience))


class VerifyOldTextOnce(TextOnce):
    """Drafts the sample's old text, whose stored log-probs the rule needs."""

    def begin(self, requests: Sequence[Request]) -> None:
        if any(request.drafter and request.draft_logprobs is None for request in requests):
            raise RolloutError("the lenient rule needs the stored log-probs of every draft; the cache holds none")
        super().begin(requests)
