"""Drafts from a small causal LM that draws with the policy's own noise."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from torch import nn

from specrl.rollout.drafting.budget import Budget
from specrl.rollout.drafting.chain import Chain
from specrl.rollout.engines.base import Limits, SamplingParams
from specrl.rollout.engines.local.draw import TrimmedDraw, peculiar
from specrl.rollout.engines.local.packed import packed_model
from specrl.rollout.engines.local.reader import Reader
from specrl.rollout.types import Request

log = logging.getLogger(__name__)


class Frequent:
    """Which ids a run's texts use most.

    Args:
        vocab: ids that there are.
        first: ids that come before all others.
    """

    def __init__(self, vocab: int, first: Collection[int]):
        self._counts = np.zeros(vocab, np.int64)
        self._counts[[*first]] = 2**62

    def learn(self, texts: Iterable[Sequence[int]]) -> None:
        for text in texts:
            np.add.at(self._counts, np.asarray(text, np.int64), 1)

    def most(self, size: int) -> np.ndarray:
        """The `size` most frequent ids, ascending; of equals the lower, as tokenizers number what is frequent first."""
        return np.sort(np.argsort(-self._counts, kind="stable")[:size])


class ModelDrafter:
    """Chain drafts for a whole batch: what a small model would emit with each row's key at each position.

    Model and policy add the same noise to their logits, so their draws agree with probability about 1 - TV where two
    independent draws agree with sum(p * q). Rolling back is comparing what the model holds of a row with what the row
    has emitted since, and writing on from the first difference.

    Args:
        model: any causal LM that the transformers engine runs, with the policy's vocabulary.
        sampling: the policy's sampling law, which the drafts follow.
        limits: see RolloutConfig.
        ids: most that drafts are drawn from, the most frequent in the prompts and responses so far; 0: all. The output
            layer reads as many rows less.

    Raises:
        RolloutError: the model does not run packed passes.
    """

    reads_states = False
    """It drafts from the policy's last hidden states."""

    def __init__(self, model: nn.Module, sampling: SamplingParams, limits: Limits | None = None, ids: int = 0):
        self.ragged = packed_model(model, sampling, limits, checked=not self.reads_states)
        self.inference, self.timing = self.ragged.inference, self.ragged.timing
        self.vocab, self.context = self.ragged.vocab, self.ragged.context
        self.model = model
        self.dropped = 0
        """Draws thrown away because the model's logits were NaN or infinite."""
        self._frequent = None
        if 0 < ids < self.vocab:
            self._trim(sampling, ids)

    def open(self, requests: Sequence[Request], places: int, policy: Reader) -> None:
        """Rows of these requests follow, at most `places` at a time. Nothing is computed before the first draft.

        Args: policy: at work on the same rows.
        """
        self._reader = self._reading(requests, places, policy)
        self.behind, self.leave = self._reader.behind, self._reader.leave
        if self._frequent:
            self._frequent.learn({tuple(request.prompt) for request in requests})
            self.ragged.draw.take(self._frequent.most(self._size))

    def learn(self, responses: Iterable[Sequence[int]]) -> None:
        """What a rollout's rows emitted."""
        if self._frequent:
            self._frequent.learn(responses)

    def admit(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Rows take part. Args: rows: number -> what it has emitted already."""
        self._reader.admit(dict.fromkeys(rows, ()))  # it reads what they have emitted when it drafts for them

    def propose(
        self, texts: Mapping[int, Sequence[int]], room: Sequence[int], chain: Chain, budget: Budget
    ) -> list[list[int]]:
        """Drafts for some rows: one pass catches up with what they emitted, each further adds a token.

        Args:
            texts: number of each row -> the response it has emitted so far.
            room: most tokens of each draft, at least 1.
            chain: the stop rule, over indices into `texts`.
            budget: told what every pass took.
        """
        rows, drafts = [*texts], [[] for _ in texts]
        if chain.going:
            self._reader.prefill()
        feed = {i: self._reader.lacking(rows[i], texts[rows[i]]) for i in chain.going}
        while going := chain.going:
            began = time.perf_counter()
            drawn = {}
            for part in self._reader.parts({rows[i]: feed[i] for i in going}):
                drawn |= self._reader.read(part, ends=True)
            logprobs = [drawn[rows[i]].logprobs[0] if drawn[rows[i]].usable else math.nan for i in going]
            budget.drafter.observe(sum(len(feed[i]) for i in going), time.perf_counter() - began, len(going))
            self.dropped += sum(map(math.isnan, logprobs))
            for i in chain.step(logprobs, room):
                drafts[i] += drawn[rows[i]].draws
            feed = {i: drafts[i][-1:] for i in chain.going}
        return drafts

    def _reading(self, requests: Sequence[Request], places: int, policy: Reader) -> Reader:
        return Reader(self.ragged, requests, places)

    def _trim(self, sampling: SamplingParams, ids: int) -> None:
        if reason := peculiar(self.ragged.lm_head):
            log.warning(
                "drafts are drawn from all %d ids and not from the %d of rollout.local.drafter_vocab: %s",
                self.vocab,
                ids,
                reason,
            )
            return
        self._frequent, self._size = Frequent(self.vocab, sampling.eos_ids), ids
        self.ragged.draw = TrimmedDraw(self.ragged.lm_head, sampling, self.ragged.limits.logits_mb, ids)
