"""vLLM as it comes, with its own sampler and its own speculation: what a benchmark compares specrl with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.sampling_params import RequestOutputKind

from rollout.engines.base import EngineSpec, Sampling
from rollout.engines.vllm.engine import LLM, SamplingParams, settings, shut_down
from rollout.types import Request, RolloutError

METHODS = {
    "": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
}
"""vLLM's own speculation that needs no second model, with the values its documentation suggests."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What vLLM produced, and in how many engine steps."""

    tokens: list[list[int]]
    steps: int
    accepted: int
    """Draft tokens that stood."""


class PlainVLLM:
    """One vLLM engine with the run's settings and one of METHODS.

    Raises:
        RolloutError: vLLM cannot run the method here; the message says why.
    """

    def __init__(self, spec: EngineSpec, sampling: Sampling, method: str = ""):
        self.sampling, self._borrowed_group = sampling, torch.distributed.is_initialized()
        try:
            self._llm = LLM(**settings(spec), speculative_config=METHODS[method], disable_log_stats=False)
        except Exception as error:  # whatever its own speculation needs and lacks
            raise RolloutError(f"vLLM cannot speculate by {method or 'nothing'} here: {error}") from error

    def generate(self, requests: Sequence[Request]) -> Decoded:
        """A response per request, drawn with a seed of the request's key; drafters are ignored."""
        before = self._accepted()
        engine, found, steps = self._llm.llm_engine, {}, 0
        for i, request in enumerate(requests):
            params = SamplingParams(
                temperature=self.sampling.temperature,
                top_p=self.sampling.top_p,
                top_k=self.sampling.top_k,
                seed=request.key & 0x7FFFFFFF,
                max_tokens=request.max_new_tokens,
                stop_token_ids=sorted(self.sampling.eos_ids),
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(i), {"prompt_token_ids": list(request.prompt)}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found[int(output.request_id.partition("-")[0])] = list(output.outputs[0].token_ids)
            steps += 1
        return Decoded([found[i] for i in range(len(requests))], steps, self._accepted() - before)

    def reset_cache(self) -> None:
        self._llm.reset_prefix_cache()

    def _accepted(self) -> int:
        metrics = {metric.name: metric for metric in self._llm.get_metrics()}
        found = metrics.get("vllm:spec_decode_num_accepted_tokens")
        return int(found.value) if found else 0

    def close(self) -> None:
        if (llm := self.__dict__.pop("_llm", None)) is not None:
            shut_down(llm, self._borrowed_group)
