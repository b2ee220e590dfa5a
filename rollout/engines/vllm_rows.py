"""What both model runners share: rows in the making, and applying the acceptance rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rollout.budget import Budget
from rollout.engines.base import Sampling, Speculation
from rollout.engines.rows import LENIENT_KEY, Row
from rollout.noise import uniform
from rollout.types import EngineStats, RolloutError
from rollout.verify import accept_exact, accept_lenient

BUG = "this is a bug in specrl, or a version of vLLM that it does not know"


@dataclass(slots=True)
class VLLMRow(Row):
    """One response in the making."""

    sampling: Sampling = field(kw_only=True)
    text: list[int] = field(default_factory=list)
    """V1: the one draft that the lenient rule verifies, by response position."""
    stretch: int = 0
    """V2: tokens of the last continuation that was cut to ask the drafter again."""


@dataclass(kw_only=True)
class Rules:
    """How rows draft and what they accept."""

    speculation: Speculation
    budget: Budget
    vocab: int
    weight_version: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    """Of the current rollout."""

    @property
    def lenient(self) -> bool:
        return self.speculation.rule == "lenient"

    def settle(
        self, row: VLLMRow, tested: list[int], draws: list[int], logp: list[float], logp_tested: Sequence[float]
    ) -> int:
        """Decides about the draft tokens `tested` and emits; returns the number of tokens emitted.

        Args: draws and their log-probs logp, at the positions of `tested` and, where it was drawn, the one after;
        logp_tested: log-probs of `tested`. An empty `tested` emits the one draw.
        """
        if self.lenient and tested:
            first, k = len(row.tokens), len(tested)
            old = torch.tensor(row.request.draft_logprobs[first : first + k], device="cpu")
            u = uniform(torch.tensor(row.request.key ^ LENIENT_KEY).expand(k), torch.arange(first, first + k))
            n = accept_lenient(torch.tensor(logp_tested[:k]), old, u, self.speculation.lenience)
            row.drafting = n == k  # the published method drafts once: nothing after the first rejection
            emitted, logprobs = tested[:n] + draws[n : n + 1], [*logp_tested[:n], *logp[n : n + 1]]
            behaviour = old[:n].tolist() + logp[n : n + 1]
        else:
            n = accept_exact(draws, tested)
            emitted, logprobs = draws[: n + 1], logp[: n + 1]
            behaviour = logprobs
        count = row.emit(emitted, logprobs, behaviour, n, row.sampling.eos_ids)
        self.stats.count(row.carried, len(tested), min(n, count))
        row.learn(self.budget, tested, emitted, n)
        return count

    def refuse_nan(self, numbers: Sequence[float]) -> None:
        """Raises when the policy's logits were not usable, which shows as NaN in what was computed from them."""
        if any(x != x for x in numbers):
            raise RolloutError(
                f"the policy returned NaN or infinite logits (weight version {self.weight_version}); "
                "check the learning rate and the last update"
            )
