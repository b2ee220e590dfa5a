"""Model Runner V1: `sample` takes the place of vLLM's sampler, then vLLM asks `propose` for the next drafts.

vLLM's worker lives in the driver's process, so rows, drafters and budget are plain shared objects.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import LLM
from vllm.v1.outputs import SamplerOutput

from specrl.rollout.drafting.draft import Draft
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.sampler import packed_sample
from specrl.rollout.engines.vllm.batch import VerifyInputs, VLLMRow, padded
from specrl.rollout.engines.vllm.flow import Flow
from specrl.rollout.verify import exact


@dataclass(kw_only=True)
class V1Adapter:
    """Samples and drafts in V1's step.

    Args:
        chunk: positions sampled at a time; bounds the memory of the noise.
    """

    flow: Flow
    chunk: int

    def install(self, llm: LLM) -> None:
        """Makes vLLM sample and draft by the flow."""
        llm.collective_rpc("specrl_install_adapter", args=(self,))

    def install_in(self, runner: Any) -> None:
        """Makes vLLM's model runner, in this process, sample and draft by the flow."""
        runner._sample = MethodType(self.sample, runner)
        runner.drafter.propose = self.propose
        lift_draft_limit(runner)
        self.flow.keep_hidden(runner.model)

    def sampling_params(self, row: VLLMRow) -> dict[str, Any]:
        """The row's sampling params in arguments of vLLM's SamplingParams."""
        return {"temperature": 0.0}  # `sample` decides, and a greedy request carries the least state

    def sample(self, runner, logits: Tensor, metadata) -> SamplerOutput:
        """Decides every row's next tokens from logits [drafts + rows, V], a row's positions together and in order."""
        ids = runner.input_batch.req_ids
        rows = [self.flow.rows.get(name) for name in ids]
        unfinished = runner.discard_request_mask.np[: len(ids)].tolist()
        if True in unfinished:  # this step computed a part of their prompts
            rows = [None if part else row for part, row in zip(unfinished, rows, strict=True)]
        counts, tokens = [0] * len(ids), np.empty(0, np.int32)
        if metadata:
            counts, tokens = metadata.num_draft_tokens, metadata.draft_token_ids.cpu().numpy()
        inputs = self.flow.verify_inputs(rows, np.array(counts), tokens)
        self.flow.step.tokens = int(runner.query_start_loc.np[len(ids)])
        drafts = self.flow.drafts_of(inputs)
        tokens, sizes = self.flow.accept(inputs, drafts, self._packed(logits, inputs, drafts))
        sampled = padded(tokens, inputs.starts, sizes, max(counts) + 1)
        return SamplerOutput(sampled_token_ids=torch.from_numpy(sampled).to(logits.device), logprobs_tensors=None)

    def propose(self, sampled_token_ids: list[list[int]], *_, **__) -> list[list[int]]:
        """The draft of each row's next step."""
        began = time.perf_counter()
        rows = zip(self.flow.batch.rows, sampled_token_ids, strict=True)
        drafts = self.flow.propose([row if row and tokens and row.finish is None else None for row, tokens in rows])
        self.flow.step.draft_s = time.perf_counter() - began
        return drafts

    def _packed(self, logits: Tensor, inputs: VerifyInputs, drafts: Sequence[Draft]) -> np.ndarray:
        """What `packed_sample` returns for the rows' positions, int32 [4, N]; 0 elsewhere."""
        if self.flow.rule is not exact:
            inputs.columns[3] = self.flow.targets(inputs, drafts)[inputs.sampled]
        sampling = inputs.batch.sampling
        columns = torch.from_numpy(inputs.columns[1:]).to(logits.device)
        if inputs.dense and len(sampling) == 1 and columns.shape[1] <= self.chunk:  # most steps: nothing is cut out
            return packed_sample(logits, *columns.unbind(), *sampling[0].terms).cpu().numpy()
        positions = np.arange(len(logits))[inputs.sampled]
        chunks = []
        for params, part in by_params(sampling, inputs.sizes[inputs.sizes > 0], self.chunk):
            chunk = logits[part if inputs.dense else torch.from_numpy(positions[part]).to(logits.device)]
            chunks.append((positions[part], packed_sample(chunk, *columns[:, part].unbind(), *params.terms)))
        packed = np.zeros((4, len(logits)), np.int32)
        for index, sampled in chunks:  # copied when all of them are launched
            packed[:, index] = sampled.cpu().numpy()
        return packed


class RequestDrafter:
    """What V1's `speculative_config.model` names; an adapter takes over `propose`."""

    def __init__(self, vllm_config):
        pass

    def load_model(self, *_) -> None:
        """There is none."""

    def propose(self, sampled_token_ids: list[list[int]], *_, **__) -> list[list[int]]:
        """No draft for any row."""
        return [[] for _ in sampled_token_ids]


def by_params(
    sampling: Sequence[SamplingParams], sizes: np.ndarray, most: int
) -> Iterator[tuple[SamplingParams, slice | np.ndarray]]:
    """The positions of rows that share sampling params, at most `most` at a time.

    Args: sizes: int64, positions of each row of `sampling`; a single entry of `sampling` applies to all rows.
    """
    if len(sampling) == 1:
        yield from ((sampling[0], slice(i, i + most)) for i in range(0, int(sizes.sum()), most))
        return
    for params in dict.fromkeys(sampling):
        positions = np.flatnonzero(np.repeat([other == params for other in sampling], sizes))
        yield from ((params, positions[i : i + most]) for i in range(0, len(positions), most))


def lift_draft_limit(runner) -> None:
    """Lets rows draft up to the end of the context.

    Drafts end before the row's cap, so they always fit. vLLM's own check would answer a row near the end of the context
    with made-up drafts for the whole batch.
    """
    runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens
