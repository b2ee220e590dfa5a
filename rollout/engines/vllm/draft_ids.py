"""vLLM's draft model samples among the ids that a run's texts use most (VocabTrim, arXiv 2506.22694).

Its pass then reads as many rows less of the output layer, which takes most of the time of a draft model of one layer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from vllm import LLM
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from specrl.rollout.drafting.frequent import Frequent
from specrl.rollout.engines.response import Response

log = logging.getLogger(__name__)


class DraftIds:
    """Chooses the ids before each rollout.

    Args:
        size: number of ids; 0, or all that there are: the draft model samples among all.
        first: ids that come before all others.
    """

    def __init__(self, llm: LLM, size: int, vocab: int, first: Collection[int]):
        self._llm = llm
        self._size = size if size < vocab else 0
        self._frequent = Frequent(vocab, first)

    def choose(self, rows: Sequence[Response]) -> None:
        """The workers' draft models sample among the most frequent ids from now on, by their present output layers."""
        if not self._size:
            return
        self._frequent.learn({tuple(row.request.prompt) for row in rows})
        reason = self._llm.collective_rpc("specrl_draft_from", args=(self._frequent.most(self._size),))[0]
        if reason:
            message = "drafts are sampled from all ids and not from the %d most frequent: %s"
            log.warning(message, self._size, reason)
            self._size = 0

    def learn(self, rows: Sequence[Response]) -> None:
        """Counts the ids of finished responses."""
        if self._size:
            self._frequent.learn(row.tokens for row in rows)


def draft_from(runner: Any, ids: np.ndarray) -> str:
    """A worker's draft model samples among these ids, ascending; returns why it cannot, or nothing."""
    model = runner.get_draft_model()
    if reason := peculiar(model):
        return reason
    weight = model.lm_head.weight
    index = torch.from_numpy(ids).to(weight.device)
    runner.sampler.draft_ids = index.int()
    runner.sampler.draft_weight = weight.detach()[index]
    return ""


def peculiar(model: Any) -> str:
    """Why the weight of a draft model's output layer alone does not determine its logits; empty where it does."""
    layer = getattr(model, "lm_head", None)
    logits = getattr(model, "logits_processor", None)
    if layer is None or logits is None:
        return f"{type(model).__name__} has no output layer of its own"
    if layer.tp_size > 1:
        return f"the output layer is split over {layer.tp_size} GPUs"
    if type(layer.quant_method) is not UnquantizedEmbeddingMethod or getattr(layer, "bias", None) is not None:
        return "the output layer is quantised or has a bias"
    if logits.soft_cap is not None or logits.scale != 1.0:
        return "the model scales its logits"
    return ""
