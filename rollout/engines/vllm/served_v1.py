"""Keyed requests in somebody else's vLLM server on Model Runner V1: vLLM imports `KeyedDrafter` in every worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.budget import Budget
from specrl.rollout.drafting.draft import Draft
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.drafting.suffix import PromptTexts
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.sampler import rows_per_chunk
from specrl.rollout.engines.vllm.batch import VerifyInputs, VLLMRow
from specrl.rollout.engines.vllm.flow import Flow
from specrl.rollout.engines.vllm.served import ENGINE_ARGS, logits_budget
from specrl.rollout.engines.vllm.v1 import RequestDrafter, V1Adapter, by_params, lift_draft_limit
from specrl.rollout.engines.vllm.wire import KeyedRequest, extra_args_of
from specrl.rollout.noise import process_logits
from specrl.rollout.types import Request, RolloutError

log = logging.getLogger(__name__)


class ServedFlow(Flow):
    """Goes on where the logits of some rows are NaN or infinite, as the other requests are not theirs."""

    unusable: Sequence[int] = ()
    """These rows of the last step, whose tokens mean nothing."""

    def accept(
        self, inputs: VerifyInputs, drafts: Sequence[Draft], packed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        gaps = packed[3].view(np.float32)
        wrong = np.isnan(gaps)
        gaps[wrong] = 0
        tokens, counts = super().accept(inputs, drafts, packed)
        emitted = zip(inputs.starts.tolist(), counts.tolist(), strict=True)
        self.unusable = [i for i, (start, n) in enumerate(emitted) if wrong[start : start + n].any()]
        return tokens, counts


class KeyedDrafter(RequestDrafter):
    """What `ENGINE_ARGS["v1"]` names: drafts for keyed requests and samples them.

    Rows come and go as a server's requests do, and each brings its own sampling params.
    """

    def __init__(self, vllm_config: Any):
        scheduler_cls = vllm_config.scheduler_config.scheduler_cls
        if scheduler_cls != ENGINE_ARGS["v1"]["scheduler_cls"]:
            raise RolloutError(
                f"this vLLM server runs with scheduler_cls={scheduler_cls}, by which a request that cannot be served "
                "would end it; start it with ENGINE_ARGS['v1'] of rollout.engines.vllm.served"
            )
        vocab = vllm_config.model_config.get_vocab_size()
        self.flow = ServedFlow(
            drafting=Drafting(Budget(padded=False), redraws=True),
            draft_tokens=vllm_config.speculative_config.num_speculative_tokens,
            budget=logits_budget(vllm_config),
        )
        self.flow.drafting.vocab = vocab
        self._adapter = V1Adapter(flow=self.flow, chunk=rows_per_chunk(vocab, RolloutConfig().logits_mb))
        self._groups: WeakValueDictionary[str, PromptTexts] = WeakValueDictionary()
        self._waiting_since: float | None = None
        """When the drafts of unfinished rows were ready; None while the server may be idle."""

    def propose(self, sampled_token_ids: list[list[int]], *_, **__) -> list[list[int]]:
        """The draft of each row's next step."""
        drafts = self._adapter.propose(sampled_token_ids)
        active = any(row and row.finish is None for row in self.flow.rows.values())
        self._waiting_since = time.perf_counter() if active else None
        return drafts

    def sample(self, runner, logits: Tensor, metadata) -> SamplerOutput:
        """The next tokens of all rows of a step, those without a key sampled by vLLM's own sampler."""
        flow = self.flow
        names = runner.input_batch.req_ids
        flow.step = flow.step.next()
        self._update_rows(runner, names)
        rows = [flow.rows[name] for name in names]
        counts = metadata.num_draft_tokens if metadata else [0] * len(names)
        allowed = _without_early_end(runner, logits, counts, rows)
        output = self._adapter.sample(runner, allowed, metadata)
        if (most := runner.input_batch.sampling_metadata.max_num_logprobs) is not None:
            tokens = output.sampled_token_ids
            output.logprobs_tensors = self._logprobs(runner.sampler, allowed, counts, rows, tokens, most)
        if others := [i for i, row in enumerate(rows) if row is None]:  # last, as vLLM changes the logits in place
            _copy_rows(_vllm_sample(runner, logits, metadata), output, others)
        for i in flow.unusable:
            output.sampled_token_ids[i] = -1  # none: see ServedScheduler
            log.warning(
                "a keyed request ends with an error, as its logits are NaN or infinite (request %s); check the last "
                "update of the weights",
                names[i],
            )
        if self._waiting_since is not None:
            flow.observe(time.perf_counter() - self._waiting_since)
        return output

    def _update_rows(self, runner, names: Sequence[str]) -> None:
        """Forgets the rows of requests that have ended, and opens those of new requests."""
        rows = self.flow.rows
        for ended in rows.keys() - runner.requests.keys():
            del rows[ended]
        for name in names:
            if name not in rows:
                if not any(rows.values()):
                    self.flow.drafting.budget.next_rollout()  # the server was idle: weights may have changed
                rows[name] = self._open(runner.requests[name], runner.max_model_len)

    def _open(self, state, context: int) -> VLLMRow | None:
        """The row of one of vLLM's requests; None for one without a key."""
        keyed = KeyedRequest.read(extra_args_of(state))
        if keyed is None:
            return None
        params, prompt = state.sampling_params, state.prompt_token_ids
        n = keyed.prompt_tokens
        cap = min(len(prompt) + params.max_tokens, context) - n
        drafter = None if keyed.plain else keyed.drafter(self._groups, prompt[:n])
        request = Request(prompt[:n], keyed.key, cap, drafter, plain=keyed.plain)
        eos_ids = frozenset({*(params.stop_token_ids or ()), params.eos_token_id} - {None})
        sampling = SamplingParams(eos_ids, params.temperature, max(params.top_k, 0), params.top_p)
        tokens = [*prompt[n:], *state.output_token_ids]
        return VLLMRow(request, tokens=tokens, drafting=not keyed.plain, sampling=sampling)

    def _logprobs(
        self, sampler, logits: Tensor, counts: Sequence[int], rows: Sequence[VLLMRow | None], tokens: Tensor, most: int
    ) -> LogprobsTensors:
        """What vLLM reports with tokens [rows, width]: log-probs of each and of the `most` likeliest, in its mode."""
        width = tokens.shape[1]
        starts = torch.tensor([0, *(count + 1 for count in counts[:-1])]).cumsum(0)
        index = (starts[:, None] + torch.arange(width)).flatten()
        index = index.clamp(max=len(logits) - 1).to(logits.device)  # vLLM drops positions past a row's end
        sampling = [row.sampling if row else SamplingParams(frozenset()) for row in rows]
        tokens = tokens.flatten().clamp(min=0).long()
        positions = torch.arange(len(index))
        parts, order = [], []
        for params, part in by_params(sampling, torch.full((len(rows),), width).numpy(), self._adapter.chunk):
            order.append(positions[part])
            values = logits[index[part]].float()
            if sampler.logprobs_mode.startswith("processed"):
                values = process_logits(values, params.temperature, params.top_k, params.top_p)
            if sampler.logprobs_mode.endswith("logprobs"):
                values = values.log_softmax(-1)
            parts.append(sampler.gather_logprobs(values, most, tokens[part])[:3])
        inverse = torch.cat(order).argsort().to(logits.device)
        tokens, logprobs, ranks = (torch.cat(column)[inverse] for column in zip(*parts, strict=True))
        return LogprobsTensors(tokens, logprobs, ranks)


def _without_early_end(runner: Any, logits: Tensor, counts: Sequence[int], rows: Sequence[VLLMRow | None]) -> Tensor:
    """The logits without the ids that would end a response before its `min_tokens`."""
    masked: list[tuple[int, int]] = []
    start = 0
    for name, row, count in zip(runner.input_batch.req_ids, rows, counts, strict=True):
        params = runner.requests[name].sampling_params
        if row and len(row.tokens) < params.min_tokens:
            early = min(count + 1, params.min_tokens - len(row.tokens))
            masked += [(start + i, token) for i in range(early) for token in params.all_stop_token_ids]
        start += count + 1
    if not masked:
        return logits
    index = tuple(torch.tensor(masked, device=logits.device).T)
    return logits.index_put(index, logits.new_tensor(-torch.inf))


def _copy_rows(source: SamplerOutput, target: SamplerOutput, rows: list[int]) -> None:
    """Copies these rows of what vLLM sampled."""
    tokens = target.sampled_token_ids
    width = tokens.shape[1]
    tokens[rows] = source.sampled_token_ids[rows].to(tokens.dtype)
    if source.logprobs_tensors is not None and target.logprobs_tensors is not None:
        positions = [row * width + i for row in rows for i in range(width)]
        for ours, theirs in zip(target.logprobs_tensors[:3], source.logprobs_tensors[:3], strict=True):
            ours[positions] = theirs[positions]


_vllm_sample = GPUModelRunner._sample


@wraps(_vllm_sample)
def _sample(runner, logits, metadata) -> SamplerOutput:
    """Runners whose drafter samples call it; all others do as before."""
    drafter = getattr(runner, "drafter", None)
    if isinstance(drafter, KeyedDrafter):
        lift_draft_limit(runner)
        return drafter.sample(runner, logits, metadata)
    return _vllm_sample(runner, logits, metadata)


GPUModelRunner._sample = _sample  # type: ignore[method-assign,assignment]  # replaces vLLM's own
