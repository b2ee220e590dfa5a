"""Model Runner V2: drafts of the host's drafters ride in vLLM's own step, each row with a length of its own.

A step carries each row's last token and its draft. The verifier draws at all of them; what was drawn comes to the host
once a step, where the rule decides and the drafters learn. So scheduling is synchronous: vLLM asks after each step how
many draft tokens every row carries in the next.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import DraftTokenIds

from specrl.rollout.engines.vllm.requests import OneRequest
from specrl.rollout.engines.vllm.rows import VLLMRow
from specrl.rollout.engines.vllm.sampler import KeyedVerifier, install
from specrl.rollout.engines.vllm.step import VerifyInputs, keep_hidden, padded
from specrl.rollout.engines.vllm.wire import KEY
from specrl.rollout.verify import exact


class HostVerifier(KeyedVerifier):
    """Lets a `Native` decide, on the host, what stands."""

    flow: Native

    def __call__(self, logits, input_batch, draft_logits=None, invalid_drafts=None):
        self._batch, self._done = input_batch, 0
        self.flow.count(input_batch.num_tokens)
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

    def _verify(
        self, logits, draft_logits, inputs, pos, firsts, slots, slots_np, row_slots, row_places, lengths_np, drafts
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See KeyedVerifier. Many rows are verified chunk by chunk: this one's requests follow the last one's."""
        part = slice(self._done, self._done + len(slots_np))
        self._done = part.stop
        counts = np.diff(self._batch.cu_num_logits_np[part.start : part.stop + 1]) - 1
        unfinished = lengths_np < self._batch.prefill_len_np[part]  # prompts of which this step computed only a part
        fed = self.flow.fed_by(slots_np, counts, unfinished, joining=self._batch.is_prefilling_np[part])
        if not fed.lineup.ours:
            given = (inputs, pos, firsts, slots, slots_np, row_slots, row_places, lengths_np, drafts)
            return super()._verify(logits, draft_logits, *given)
        tested = self.flow.tested(fed)
        if self.flow.rule is not exact:
            self.sampler.targets = torch.from_numpy(self.flow.targets(fed, tested)).to(logits.device)
        _, processed = self.sampler.sample(
            logits, row_slots, slots, slots_np, pos, inputs, row_places, lengths_np, return_logprobs=True
        )
        began = int(self._batch.cu_num_logits_np[part.start])
        tokens, sizes = self.flow.decide(fed, tested, self.sampler.packed.cpu().numpy(), began)
        width = self.num_speculative_steps + 1
        told = padded(tokens.astype(np.int64), fed.firsts, sizes, width).clip(0), sizes.astype(np.int32)
        tokens, stand = (torch.from_numpy(column).to(logits.device) for column in told)
        return processed, tokens, stand


@dataclass(kw_only=True)
class Native(OneRequest):
    """One request a response, on V2."""

    _slots: dict[int, VLLMRow | None] = field(default_factory=dict)
    """What vLLM's slots hold; None: a request that is scored, not sampled."""
    _drafts: np.ndarray = field(init=False)
    """Int64 [slots, K], the draft in each slot's next step, -1 behind it."""
    _lengths: list[int] = field(default_factory=list)
    """Draft tokens of each row in the next step."""

    def install(self, runner) -> None:
        keep_hidden(runner, self)
        verifier = install(runner, HostVerifier)
        verifier.flow = self
        runner.sampler.verifier = verifier
        add, take = runner.model_state.add_request, runner.take_draft_token_ids

        def add_request(slot: int, request) -> None:
            add(slot, request)
            self._slots[slot] = self.rows.get(request.req_id)

        def take_draft_token_ids() -> DraftTokenIds | None:
            asked = take()
            if asked is None:
                return None
            return DraftTokenIds(asked.req_ids, [[-1] * n for n in self._lengths])

        runner.model_state.add_request, runner.take_draft_token_ids = add_request, take_draft_token_ids
        self._drafts = np.full((runner.max_num_reqs, runner.num_speculative_steps), -1)
        runner.speculator.propose = lambda batch, *_, dummy_run=False, **__: torch.from_numpy(
            self.fill(batch, dummy_run)
        ).to(runner.device)

    def law(self, row: VLLMRow) -> dict:
        law = row.sampling
        terms = {"temperature": law.temperature, "top_k": law.top_k, "top_p": law.top_p}
        return terms | {"extra_args": {KEY: row.request.key}}

    def count(self, tokens: int) -> None:
        """A step of so many tokens is drawn."""
        self._step.tokens = tokens

    def fed_by(
        self, slots: np.ndarray, counts: np.ndarray, unfinished: np.ndarray, joining: np.ndarray
    ) -> VerifyInputs:
        """What the rows of these slots fed. Args: counts: draft tokens; joining: rows that vLLM pads."""
        rows = [None if late else self._slots.get(slot) for slot, late in zip(slots.tolist(), unfinished, strict=True)]
        drafts = np.where(joining[:, None], -1, self._drafts[slots])
        return self.fed(rows, counts, drafts[np.arange(drafts.shape[1]) < counts[:, None]])

    def fill(self, batch, dummy_run: bool) -> np.ndarray:
        """The drafts that ride next, int64 [R, K]; any id fills a row, as it stands only if it is drawn."""
        slots = batch.idx_mapping_np
        if dummy_run:
            return np.zeros((batch.num_reqs, self._drafts.shape[1]), np.int64)
        began = time.perf_counter()
        rows = [self._slots.get(slot) for slot in slots.tolist()]
        lists = self.ask([row if row and row.tokens and row.finish is None else None for row in rows])
        self._lengths = [*map(len, lists)]
        tokens, sizes = np.fromiter(chain(*lists, [-1]), np.int64), np.array(self._lengths)
        self._drafts[slots] = padded(tokens, sizes.cumsum() - sizes, sizes, self._drafts.shape[1])
        self._step.draft_s = time.perf_counter() - began
        return self._drafts[slots].clip(0)
