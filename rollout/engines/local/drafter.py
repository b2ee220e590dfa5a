"""Drafts from a small causal LM that samples with the policy's own noise."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence

from transformers import PreTrainedModel

from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.budget import Budget
from specrl.rollout.drafting.chain import Chain
from specrl.rollout.drafting.frequent import Frequent
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.probe import packed_model
from specrl.rollout.engines.local.reader import Reader
from specrl.rollout.engines.local.sampler import TrimmedSampler, peculiar
from specrl.rollout.types import Request
from specrl.rollout.verify import TargetSamples

log = logging.getLogger(__name__)


class ModelDrafter:
    """Chain drafts for a batch: what a small model samples with each row's key at each position.

    Model and policy add the same noise to their logits, so their samples agree with probability about 1 - TV where two
    independent samples agree with sum(p * q). A rollback compares what the model holds of a row with what the row has
    emitted since, and writes on from the first difference.

    Args:
        model: any causal LM that the transformers engine runs, with the policy's vocabulary.
        sampling: the policy's sampling params.
        limits: see RolloutConfig.
        ids: number of ids that drafts are sampled from, the most frequent in the prompts and responses so far; 0: all.
            The output layer reads as many rows less.

    Raises:
        RolloutError: the model does not run packed passes.
    """

    reads_states = False
    """It drafts from the policy's final hidden states."""
    reader: Reader
    """Of the rows that `open` was given."""

    def __init__(
        self, model: PreTrainedModel, sampling: SamplingParams, limits: RolloutConfig | None = None, ids: int = 0
    ):
        self.packed = packed_model(model, sampling, limits, checked=not self.reads_states)
        self.model = model
        self._frequent: Frequent | None = None
        self._trimmed: TrimmedSampler | None = None
        self._warned = False
        if 0 < ids < self.packed.vocab:
            self._trim(sampling, ids)

    def open(self, requests: Sequence[Request], max_rows: int, policy: Reader) -> None:
        """Rows of these requests follow, at most `max_rows` at a time. Nothing is computed before the first draft.

        Args: policy: at work on the same rows.
        """
        self.reader = self._reader_of(requests, max_rows, policy)
        if self._frequent and self._trimmed:
            self._frequent.learn({tuple(request.prompt) for request in requests})
            self._trimmed.take(self._frequent.most(len(self._trimmed.ids)))

    def learn(self, responses: Iterable[Sequence[int]]) -> None:
        """Counts the ids of a rollout's responses."""
        if self._frequent:
            self._frequent.learn(responses)

    def propose(
        self, texts: Mapping[int, Sequence[int]], limits: Sequence[int], chain: Chain, budget: Budget
    ) -> list[list[int]]:
        """Drafts for some rows: one pass catches up with what they emitted, each further pass adds a token.

        Args:
            texts: number of each row -> the response it has emitted so far.
            limits: most tokens of each draft, at least 1.
            chain: the stop rule, over indices into `texts`.
            budget: observes the seconds of every pass.
        """
        rows = [*texts]
        drafts: list[list[int]] = [[] for _ in texts]
        if chain.active:
            self.reader.prefill()
        feed = {i: self.reader.missing(rows[i], texts[rows[i]]) for i in chain.active}
        while active := chain.active:
            began = time.perf_counter()
            samples: dict[int, TargetSamples] = {}
            for part in self.reader.parts({rows[i]: feed[i] for i in active}):
                samples |= self.reader.read(part, ends=True)
            logprobs = [samples[rows[i]].logprobs[0] if samples[rows[i]].usable else math.nan for i in active]
            if not self._warned and any(map(math.isnan, logprobs)):
                self._warned = True
                log.warning(
                    "The logits of rollout.drafter are NaN or infinite. Such drafts are left out, so rollouts lose its "
                    "speed. Distil it again (python -m specrl.drafter), or leave it out."
                )
            budget.drafter.observe(sum(len(feed[i]) for i in active), time.perf_counter() - began, len(active))
            for i in chain.step(logprobs, limits):
                drafts[i] += samples[rows[i]].tokens
            feed = {i: drafts[i][-1:] for i in chain.active}
        return drafts

    def _reader_of(self, requests: Sequence[Request], max_rows: int, policy: Reader) -> Reader:
        return Reader(self.packed, requests, max_rows)

    def _trim(self, sampling: SamplingParams, ids: int) -> None:
        if reason := peculiar(self.packed.lm_head):
            log.warning(
                "drafts are sampled from all %d ids and not from the %d most frequent: %s",
                self.packed.vocab,
                ids,
                reason,
            )
            return
        self._frequent = Frequent(self.packed.vocab, sampling.eos_ids)
        self._trimmed = TrimmedSampler(self.packed.lm_head, sampling, ids)
        self.packed.sampler = self._trimmed
