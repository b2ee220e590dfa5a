"""Model Runner V2 where the host drafts: each step samples at each row's last token and at all of its draft.

The samples come to the host once a step, where the flow decides and the drafters learn. So scheduling is synchronous:
vLLM asks after each step how many draft tokens each row has in the next.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import LLM
from vllm.v1.outputs import DraftTokenIds

from specrl.rollout.drafting.draft import Draft
from specrl.rollout.engines.vllm.batch import VerifyInputs, VLLMRow, padded
from specrl.rollout.engines.vllm.flow import Flow
from specrl.rollout.engines.vllm.sampler import KeyedSampler, KeyedVerifier, install
from specrl.rollout.engines.vllm.wire import keyed_args
from specrl.rollout.verify import exact


class HostVerifier(KeyedVerifier):
    """Lets the flow decide on the host which draft tokens are accepted."""

    adapter: V2Adapter
    sampler: KeyedSampler
    _input_batch: Any
    _inputs: VerifyInputs
    _drafts: list[Draft]

    def __call__(self, logits, input_batch, draft_logits=None, invalid_drafts=None):
        self._input_batch = input_batch
        self._verified = 0
        self.adapter.flow.step.tokens = input_batch.num_tokens
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

    def prepare(self, idx_mapping_np: np.ndarray, seq_lens_upper_bound_np: np.ndarray) -> None:
        """See KeyedVerifier. vLLM verifies many rows in chunks: these requests follow those of the last chunk."""
        batch, flow = self._input_batch, self.adapter.flow
        part = slice(self._verified, self._verified + len(idx_mapping_np))
        self._verified = part.stop
        self._first = int(batch.cu_num_logits_np[part.start])
        counts = np.diff(batch.cu_num_logits_np[part.start : part.stop + 1]) - 1
        unfinished = seq_lens_upper_bound_np < batch.prefill_len_np[part]  # this step computed a part of their prompts
        inputs = self.adapter.verify_inputs(idx_mapping_np, counts, unfinished, batch.is_prefilling_np[part])
        self._inputs = inputs
        self._drafts = flow.drafts_of(inputs)
        if flow.rule is not exact and inputs.batch.active:
            self.sampler.targets = torch.from_numpy(flow.targets(inputs, self._drafts))

    def accept(self, sampled: Tensor, cu_num_logits: Tensor, verify_draft_sampled: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self._inputs
        if not inputs.batch.active:
            return super().accept(sampled, cu_num_logits, verify_draft_sampled)
        assert self.sampler.packed is not None  # of this step, as these rows have keys
        packed = self.sampler.packed.cpu().numpy()
        tokens, sizes = self.adapter.flow.accept(inputs, self._drafts, packed, self._first)
        rows = padded(tokens.astype(np.int64), inputs.starts, sizes, self.num_speculative_steps + 1).clip(0)
        counts = sizes.astype(np.int32)
        return torch.from_numpy(rows).to(sampled.device), torch.from_numpy(counts).to(sampled.device)


@dataclass(kw_only=True)
class V2Adapter:
    """Samples and drafts in V2's step."""

    flow: Flow
    _rows: dict[int, VLLMRow | None] = field(default_factory=dict)
    """By index of vLLM's request states; None: a request that is scored, not sampled."""
    _drafts: np.ndarray = field(init=False)
    """Int64 [requests, K], the draft of each index in the next step, -1 after it."""
    _lengths: list[int] = field(default_factory=list)
    """Draft tokens of each row in the next step."""

    def install(self, llm: LLM) -> None:
        """See V1Adapter.install."""
        llm.collective_rpc("specrl_install_adapter", args=(self,))

    def install_in(self, runner: Any) -> None:
        """See V1Adapter.install_in."""
        self.flow.keep_hidden(runner.model)
        install(runner, HostVerifier)
        runner.rejection_sampler.adapter = self
        runner.sampler.requests.listeners.append(self._add_request)
        take = runner.take_draft_token_ids

        def take_draft_token_ids() -> DraftTokenIds | None:
            taken = take()
            if taken is None:
                return None
            return DraftTokenIds(taken.req_ids, [[-1] * n for n in self._lengths])

        runner.take_draft_token_ids = take_draft_token_ids
        self._drafts = np.full((runner.max_num_reqs, runner.num_speculative_steps), -1)
        runner.speculator.propose = lambda input_batch, *_, dummy_run=False, **__: torch.from_numpy(
            self._propose(input_batch, dummy_run)
        ).to(runner.device)

    def sampling_params(self, row: VLLMRow) -> dict[str, Any]:
        params = row.sampling
        return {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "extra_args": keyed_args(row.request),
        }

    def verify_inputs(
        self, idx_mapping_np: np.ndarray, counts: np.ndarray, unfinished: np.ndarray, is_prefilling_np: np.ndarray
    ) -> VerifyInputs:
        """The positions of the requests at these indices.

        Args: counts: draft tokens of each; is_prefilling_np: those whose draft is vLLM's padding.
        """
        indices = zip(idx_mapping_np.tolist(), unfinished, strict=True)
        rows = [None if part else self._rows.get(index) for index, part in indices]
        drafts = np.where(is_prefilling_np[:, None], -1, self._drafts[idx_mapping_np])
        return self.flow.verify_inputs(rows, counts, drafts[np.arange(drafts.shape[1]) < counts[:, None]])

    def _add_request(self, req_index: int, new_req_data) -> None:
        self._rows[req_index] = self.flow.rows.get(new_req_data.req_id)

    def _propose(self, input_batch, dummy_run: bool) -> np.ndarray:
        """The next drafts, int64 [R, K]; any id fills a row, as it is accepted only if it is sampled."""
        if dummy_run:
            return np.zeros((input_batch.num_reqs, self._drafts.shape[1]), np.int64)
        began = time.perf_counter()
        indices = input_batch.idx_mapping_np
        rows = [self._rows.get(index) for index in indices.tolist()]
        drafts = self.flow.propose([row if row and row.tokens and row.finish is None else None for row in rows])
        self._lengths = [*map(len, drafts)]
        tokens = np.fromiter(chain(*drafts, [-1]), np.int64)
        sizes = np.array(self._lengths)
        self._drafts[indices] = padded(tokens, sizes.cumsum() - sizes, sizes, self._drafts.shape[1])
        self.flow.step.draft_s = time.perf_counter() - began
        return self._drafts[indices].clip(0)
