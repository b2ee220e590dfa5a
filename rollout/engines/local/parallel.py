"""Drafts of a whole chain from one pass of a small causal LM, after PARD (arXiv 2504.18583)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from torch import nn

from rollout.drafting.budget import Budget
from rollout.drafting.chain import Chain
from rollout.engines.base import Limits, Sampling
from rollout.engines.local.drafter import ModelDrafter


class ParallelDrafter(ModelDrafter):
    """Mask tokens behind a row's last one answer for the tokens behind it, all with the policy's noise.

    A mask sees the text and the masks before it, as any token would; what is written of masks is written over when the
    row goes on, like drafts that did not stand.

    Args:
        model: see ModelDrafter; its configuration says `pard_token`, the id of the mask, as vLLM reads it, and
            `parallel_drafts`, the K tokens that one pass drafts.
    """

    def __init__(self, model: nn.Module, sampling: Sampling, limits: Limits | None = None):
        super().__init__(model, sampling, limits)
        self._mask, self.at_once = model.config.pard_token, model.config.parallel_drafts

    def propose(
        self, texts: Mapping[int, Sequence[int]], room: Sequence[int], chain: Chain, budget: Budget
    ) -> list[list[int]]:
        """Drafts for some rows in one pass, which also catches up with what they emitted; see ModelDrafter."""
        rows, drafts = [*texts], [[] for _ in texts]
        if not chain.going:
            return drafts
        self._reader.prefill()
        most = {i: min(room[i], self.at_once) for i in chain.going}
        feed = {
            rows[i]: self._reader.lacking(rows[i], texts[rows[i]]) + [self._mask] * (k - 1) for i, k in most.items()
        }
        began, drawn = time.perf_counter(), {}
        for part in self._reader.parts(feed):
            drawn |= self._reader.read(part)
        budget.drafter.observe(sum(map(len, feed.values())), time.perf_counter() - began, len(feed))
        self.dropped += sum(not drawn[row].usable for row in feed)
        answers = {i: [*zip(drawn[rows[i]].draws, drawn[rows[i]].logprobs, strict=True)][-k:] for i, k in most.items()}
        for depth in range(self.at_once):
            logprobs = [
                answers[i][depth][1] if depth < most[i] and drawn[rows[i]].usable else math.nan for i in chain.going
            ]
            for i in chain.step(logprobs, room):
                drafts[i].append(answers[i][depth][0])
            if not chain.going:
                break
        return drafts


def model_drafter(model: nn.Module, sampling: Sampling, limits: Limits | None = None) -> ModelDrafter:
    """The drafter that the model was made for: one pass for all drafts where its configuration names a mask."""
    kind = ModelDrafter if getattr(model.config, "pard_token", None) is None else ParallelDrafter
    return kind(model, sampling, limits)
