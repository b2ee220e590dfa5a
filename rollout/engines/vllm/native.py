"""Model Runner V2: drafts of the host's drafters ride in vLLM's own step, each row with a length of its own.

A step carries each row's last token and its draft. The verifier draws at all of them; what was drawn comes to the host
once a step, where the rule decides and the drafters learn. So scheduling is synchronous: vLLM asks after each step how
many draft tokens every row carries in the next.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import DraftTokenIds

from rollout.engines.local.draw import unpack
from rollout.engines.response import refuse_unusable
from rollout.engines.vllm.requests import OneRequest
from rollout.engines.vllm.rows import VLLMRow
from rollout.engines.vllm.sampler import KeyedVerifier, install
from rollout.engines.vllm.step import keep_hidden
from rollout.engines.vllm.wire import KEY
from rollout.verify import Drawn


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
        riding = np.where(self._batch.is_prefilling_np[part], 0, counts)  # a row that joins is padded
        rows = self.flow.begin_step(slots_np, riding, unfinished)
        if not any(rows):
            given = (inputs, pos, firsts, slots, slots_np, row_slots, row_places, lengths_np, drafts)
            return super()._verify(logits, draft_logits, *given)
        self.sampler.targets = torch.from_numpy(self.flow.targets(rows, counts)).to(logits.device)
        _, processed = self.sampler.sample(
            logits, row_slots, slots, slots_np, pos, inputs, row_places, lengths_np, return_logprobs=True
        )
        drawn = unpack(self.sampler.packed.cpu())
        began = int(self._batch.cu_num_logits_np[part.start])
        told = self.flow.decide(rows, counts, drawn, self.num_speculative_steps + 1, began)
        tokens, stand = (torch.from_numpy(column).to(logits.device) for column in told)
        return processed, tokens, stand


@dataclass(kw_only=True)
class Native(OneRequest):
    """One request a response, on V2."""

    _slots: dict[int, VLLMRow | None] = field(default_factory=dict)
    """What vLLM's slots hold; None: a request that is scored, not sampled."""
    _lengths: list[int] = field(default_factory=list)
    """Draft tokens of each row in the next step."""

    def install(self, runner) -> None:
        """Puts itself into the model runner; the worker extension calls it."""
        keep_hidden(runner, self)
        verifier = install(runner, HostVerifier)
        verifier.flow = self
        runner.sampler.verifier = verifier
        add, take = runner.model_state.add_request, runner.take_draft_token_ids

        def add_request(slot: int, request) -> None:
            add(slot, request)
            self._slots[slot] = self._rows.get(request.req_id)

        def take_draft_token_ids() -> DraftTokenIds | None:
            asked = take()
            if asked is None:
                return None
            return DraftTokenIds(asked.req_ids, [[-1] * n for n in self._lengths])

        runner.model_state.add_request, runner.take_draft_token_ids = add_request, take_draft_token_ids
        width, device = runner.num_speculative_steps, runner.device
        runner.speculator.propose = lambda batch, *_, dummy_run=False, **__: torch.from_numpy(
            self.fill(batch, width, dummy_run)
        ).to(device)

    def law(self, row: VLLMRow) -> dict:
        law = row.sampling
        terms = {"temperature": law.temperature, "top_k": law.top_k, "top_p": law.top_p}
        return terms | {"extra_args": {KEY: row.request.key}}

    def count(self, tokens: int) -> None:
        """A step of so many tokens is drawn."""
        self._step.tokens = tokens

    def begin_step(self, slots, riding, unfinished) -> list[VLLMRow | None]:
        """The rows of a step, with the drafts that rode."""
        rows = [None if late else self._slots.get(slot) for slot, late in zip(slots.tolist(), unfinished, strict=True)]
        for row, n in zip(rows, riding.tolist(), strict=True):
            if row:
                row.riding = row.riding[:n]
                row.tested = self._tested(row, row.riding)
                self._step.drafted += len(row.riding)
                self._step.decoding |= bool(row.tokens)
        return rows

    def targets(self, rows, counts) -> np.ndarray:
        """The token that each position of a step is compared with, int64 [N]."""
        targets, first = np.zeros(int(counts.sum()) + len(counts), np.int64), 0
        for row, count in zip(rows, counts.tolist(), strict=True):
            if row:
                tokens = row.tested.tokens[: count + 1]
                targets[first : first + len(tokens)] = tokens
            first += count + 1
        return targets

    def decide(self, rows, counts, drawn, width: int, began: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64 [R, width] of each request and how many they are, int32 [R].

        Args: began: logits of the step before these.
        """
        draws, logprobs, text, gaps = drawn
        tokens, stand, first = np.zeros((len(rows), width), np.int64), np.ones(len(rows), np.int32), 0
        for i, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
            if row:
                part = slice(first, first + len(row.riding) + 1)
                refuse_unusable((gap == gap for gap in gaps[part]), self.weight_version)
                columns, states = (draws[part], logprobs[part], text[part]), (self.hidden, began + first)
                n = self.settle(row, row.tested, Drawn(len(row.tokens), *columns, states=states))
                self.stats.ties += int((gaps[part][:n] < self.tie_margin).sum())
                tokens[i, :n], stand[i] = row.tokens[-n:], n
            first += count + 1
        return tokens, stand

    def fill(self, batch, width: int, dummy_run: bool) -> np.ndarray:
        """The drafts that ride next, int64 [R, width]; any id fills a row, as it stands only if it is drawn."""
        drafts = np.zeros((batch.num_reqs, width), np.int64)
        if dummy_run:
            return drafts
        began = time.perf_counter()
        rows = [self._slots.get(slot) for slot in batch.idx_mapping_np.tolist()]
        rows = [row if row and row.tokens and row.finish is None else None for row in rows]
        lists = self.ask(rows)
        for row, tokens, place in zip(rows, lists, drafts, strict=True):
            place[: len(tokens)] = tokens
            if row:
                row.riding = tokens
        self._lengths = [len(tokens) for tokens in lists]
        self._step.draft_s = time.perf_counter() - began
        return drafts
