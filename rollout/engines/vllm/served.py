"""Keyed requests in somebody else's vLLM server: exact reuse for trainers that own their engines.

A server that is started with `ENGINE_ARGS` draws a request whose `extra_args` hold a KeyedRequest with this package's
noise and drafts from the texts it brought; all others are drawn by vLLM itself. The tokens of a keyed request are those
of the same request without texts. This file is the way of Model Runner V1: vLLM imports `KeyedDrafter` in every worker.
served_v2.py is that of V2.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import wraps
from weakref import WeakValueDictionary

import numpy as np
import torch
import vllm
from torch import Tensor
from vllm import envs
from vllm.triton_utils import HAS_TRITON
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.budget import Budget
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.drafting.suffix import PromptTexts
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.draw import rows_per_chunk
from specrl.rollout.engines.vllm.admission import SCHEDULERS
from specrl.rollout.engines.vllm.room import room_of
from specrl.rollout.engines.vllm.rows import BUG, VLLMRow
from specrl.rollout.engines.vllm.v1 import RequestDrafter, V1Rules, by_law, lift_limit
from specrl.rollout.engines.vllm.wire import KeyedRequest
from specrl.rollout.noise import process_logits
from specrl.rollout.types import Request, RolloutError

log = logging.getLogger(__name__)

_HERE = "specrl.rollout.engines.vllm"
ENGINE_ARGS = {
    "v2": {
        "speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 32},
        "worker_cls": f"{_HERE}.served_v2.KeyedWorker",
        "scheduler_cls": SCHEDULERS["v2"],
    },
    "v1": {
        "speculative_config": {
            "method": "custom_class",
            "model": f"{_HERE}.served.KeyedDrafter",
            "num_speculative_tokens": 32,
        },
        "scheduler_cls": SCHEDULERS["v1"],
    },
}
"""What a server's engine has to be given, by vLLM's model runner: V2 wherever there is Triton, V1 on CPU builds.

The number bounds a row's draft in one step, up to 127.
"""


def serve_by_default() -> None:
    """Every engine that this process starts by `vllm.AsyncEngineArgs` from now on serves keyed requests.

    For trainers that leave no way to set the engine's arguments. One that is given any of these keeps its own.
    """
    wanted = ENGINE_ARGS["v2" if HAS_TRITON and envs.VLLM_USE_V2_MODEL_RUNNER is not False else "v1"]

    class KeyedEngineArgs(vllm.AsyncEngineArgs):
        def __init__(self, *args, **options):
            if own := sorted(wanted.keys() & options.keys()):
                log.warning("an engine is given its own %s: it will not serve keyed requests", ", ".join(own))
            super().__init__(*args, **({} if own else deepcopy(wanted)), **options)

    vllm.AsyncEngineArgs = KeyedEngineArgs


class KeyedDrafter(RequestDrafter):
    """What `ENGINE_ARGS["v1"]` names: drafts for keyed requests, and draws them."""

    def __init__(self, vllm_config):
        if (given := vllm_config.scheduler_config.scheduler_cls) != SCHEDULERS["v1"]:
            raise RolloutError(
                f"this vLLM server runs with scheduler_cls={given}, by which a request that cannot be served would end "
                "it; start it with ENGINE_ARGS['v1'] of rollout.engines.vllm.served"
            )
        vocab = vllm_config.model_config.get_vocab_size()
        logits_mb, step = RolloutConfig().logits_mb, vllm_config.scheduler_config.max_num_batched_tokens
        self.rules = ServedRules(
            drafting=Drafting(Budget(padded=False), redraws=True),
            draft_tokens=vllm_config.speculative_config.num_speculative_tokens,
            room=room_of(vocab, logits_mb, vllm_config.model_config.dtype, step, served=True),
            scores_per_chunk=rows_per_chunk(vocab, logits_mb),
        )
        self.rules.drafting.vocab = vocab

    def propose(self, sampled: list[list[int]], *_, **__) -> list[list[int]]:
        """The draft of each row's next step."""
        if not self.rules.lineup.rows:
            raise RolloutError(f"vLLM asks for drafts, but drew the step itself; {BUG}")
        return self.rules.propose(sampled)


_vllm_sample = GPUModelRunner._sample


@wraps(_vllm_sample)
def _sample(runner, logits, metadata) -> SamplerOutput:
    """Runners whose drafter draws let it; all others do as before."""
    drafter = getattr(runner, "drafter", None)
    if isinstance(drafter, KeyedDrafter):
        lift_limit(runner)
        return drafter.rules.serve(runner, logits, metadata)
    return _vllm_sample(runner, logits, metadata)


GPUModelRunner._sample = _sample


@dataclass(kw_only=True)
class ServedRules(V1Rules):
    """Rows that come and go as a server's requests do; each brings its own sampling parameters."""

    _groups: WeakValueDictionary[str, PromptTexts] = field(default_factory=WeakValueDictionary)
    _waiting_since: float | None = None
    """When the drafts of rows that go on were ready; None when the server may rest."""

    def of(self, runner, names: Sequence[str]) -> list[VLLMRow | None]:
        for name in names:
            if name not in self.rows:
                if not any(self.rows.values()):
                    self.drafting.budget.next_rollout()  # the server was idle: weights may have changed
                self.rows[name] = self._open(runner.requests[name], runner.max_model_len)
        return [self.rows[name] for name in names]

    def _open(self, state, context: int) -> VLLMRow | None:
        params = state.sampling_params
        keyed = KeyedRequest.read(params and params.extra_args)
        if keyed is None:
            return None
        n, prompt = keyed.prompt_tokens, state.prompt_token_ids
        ends = {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
        cap = min(len(prompt) + params.max_tokens, context) - n
        request = Request(prompt[:n], keyed.key, cap, keyed.drafter(self._groups, prompt[:n]))
        law = SamplingParams(frozenset(ends), params.temperature, max(params.top_k, 0), params.top_p)
        return VLLMRow(request, tokens=[*prompt[n:], *state.output_token_ids], sampling=law)

    def serve(self, runner, logits: Tensor, metadata) -> SamplerOutput:
        """The next tokens of all rows of a step, those without a key drawn by vLLM's own sampler."""
        for gone in self.rows.keys() - runner.requests.keys():
            del self.rows[gone]
        names, self._step = runner.input_batch.req_ids, self._step.next()
        counts = metadata.num_draft_tokens if metadata else [0] * len(names)
        rows = self.of(runner, names)
        own = self._end_late(runner, logits, counts, rows)
        output = self.sample(runner, own, metadata)
        if (most := runner.input_batch.sampling_metadata.max_num_logprobs) is not None:
            output.logprobs_tensors = self._logprobs(runner.sampler, own, counts, rows, output.sampled_token_ids, most)
        if others := [i for i, row in enumerate(rows) if row is None]:  # last, as vLLM works on the logits in place
            _take(output, _vllm_sample(runner, logits, metadata), others)
        if self._waiting_since is not None:
            self.observe(time.perf_counter() - self._waiting_since)
        return output

    def propose(self, sampled, *_, **__) -> list[list[int]]:
        drafts = super().propose(sampled)
        going = any(row and row.finish is None for row in self.rows.values())
        self._waiting_since = time.perf_counter() if going else None
        return drafts

    @staticmethod
    def _end_late(runner, logits: Tensor, counts: Sequence[int], rows: Sequence[VLLMRow | None]) -> Tensor:
        """The logits without the ids that would end a response before its `min_tokens`."""
        places, first = [], 0
        for name, row, count in zip(runner.input_batch.req_ids, rows, counts, strict=True):
            params = runner.requests[name].sampling_params
            if row and len(row.tokens) < params.min_tokens:
                early = min(count + 1, params.min_tokens - len(row.tokens))
                places += [(first + i, end) for i in range(early) for end in params.all_stop_token_ids]
            first += count + 1
        if not places:
            return logits
        return logits.index_put(tuple(torch.tensor(places, device=logits.device).T), logits.new_tensor(-torch.inf))

    def _logprobs(self, sampler, logits: Tensor, counts, rows, tokens: Tensor, most: int) -> LogprobsTensors:
        """What vLLM reports with tokens [rows, width]: log-probs of each and of the `most` likeliest, in its mode."""
        width, firsts = tokens.shape[1], torch.tensor([0, *(count + 1 for count in counts[:-1])]).cumsum(0)
        index = (firsts[:, None] + torch.arange(width)).flatten()
        index = index.clamp(max=len(logits) - 1).to(logits.device)  # places past a row's end: vLLM drops them
        laws = [row.sampling if row else SamplingParams(frozenset()) for row in rows]
        tokens, parts, order, places = tokens.flatten().clamp(min=0).long(), [], [], torch.arange(len(index))
        for law, chosen in by_law(laws, np.full(len(rows), width), self.scores_per_chunk):
            order.append(places[chosen])
            values = logits[index[chosen]].float()
            if sampler.logprobs_mode.startswith("processed"):
                values = process_logits(values, law.temperature, law.top_k, law.top_p)
            if sampler.logprobs_mode.endswith("logprobs"):
                values = values.log_softmax(-1)
            parts.append(sampler.gather_logprobs(values, most, tokens[chosen])[:3])
        back = torch.cat(order).argsort().to(logits.device)
        return LogprobsTensors(*(torch.cat(column)[back] for column in zip(*parts, strict=True)))


def _take(output: SamplerOutput, theirs: SamplerOutput, rows: list[int]) -> None:
    """Puts what vLLM drew for `rows` into `output`."""
    tokens = output.sampled_token_ids
    width = tokens.shape[1]
    tokens[rows] = theirs.sampled_token_ids[rows].to(tokens.dtype)
    if theirs.logprobs_tensors is not None:
        places = [row * width + i for row in rows for i in range(width)]
        for mine, other in zip(output.logprobs_tensors[:3], theirs.logprobs_tensors[:3], strict=True):
            mine[places] = other[places]
