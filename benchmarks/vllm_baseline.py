"""Stock vLLM, with its own sampler and speculation, as the baseline of a benchmark.

Runs in a process of its own (benchmarks/process.py), in the user's environment: then vLLM chooses its model runner,
graphs and asynchronous scheduling by itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.process import serve

if TYPE_CHECKING:
    from specrl.rollout.engines.base import EngineSpec, SamplingParams
    from specrl.rollout.types import Request

CPU_KV_MB = 512
NGRAM = {"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 16}
METHODS = {"": "vLLM", "ngram": "vLLM + n-gram", "suffix": "vLLM + suffix"}
"""vLLM's speculation methods that need no second model, with their names in the table; empty is none."""


def settings(spec: EngineSpec, on_gpu: bool, method: str = "") -> dict:
    """Arguments of vLLM's LLM: the model and its memory, and nothing about how to run it.

    Memory is that of specrl's engine. On a GPU the engines of a comparison take turns, so each must be able to sleep;
    on a CPU vLLM's block of 128 tokens would cache no prompt of a shorter one, which specrl's engine would do alone.
    Values of the speculation are those that vLLM's documentation suggests.
    """
    vllm = spec.rollout.vllm
    kv_mb = spec.rollout.kv_cache_mb or (0 if on_gpu else CPU_KV_MB)
    arguments = {
        "model": spec.model,
        "revision": spec.revision or None,
        "trust_remote_code": spec.trust_remote_code,
        "dtype": spec.dtype,
        "seed": 0,
        "max_model_len": -1,  # the model's, or what the KV cache holds
        "kv_cache_memory_bytes": kv_mb * 2**20 or None,
        "gpu_memory_utilization": vllm.memory_utilization,
        "tensor_parallel_size": vllm.tensor_parallel,
        "generation_config": "vllm",  # the run's sampling params, not the checkpoint's
        "skip_tokenizer_init": True,  # ids in, ids out
        **({"enable_sleep_mode": True} if on_gpu else {"block_size": 32}),
    }
    if method == "ngram":
        arguments["speculative_config"] = {"method": "ngram_gpu" if on_gpu else "ngram", **NGRAM}
    elif method == "suffix":
        arguments["speculative_config"] = dict(SUFFIX)
    if method:
        arguments["disable_log_stats"] = False  # counts accepted draft tokens
    return arguments


def asked(requests: Sequence[Request], sampling: SamplingParams) -> dict:
    """A message that asks for a response to each request; keys and drafters are ignored.

    A seed of its own for each request would cost vLLM's V1 sampler a kernel a row.
    """
    sampling_params = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    sampling_params["stop_token_ids"] = sorted(sampling.eos_ids)
    return {
        "rows": [{"prompt": list(r.prompt), "max_tokens": r.max_new_tokens} for r in requests],
        "sampling_params": sampling_params,
    }


class PlainVLLM:
    """One vLLM engine.

    Args: opening: {"settings": the result of `settings`}.
    """

    def __init__(self, opening: dict):
        from vllm import LLM

        arguments = opening["settings"]
        self._llm = LLM(**arguments)
        self._sleeps, self._speculates = "enable_sleep_mode" in arguments, "speculative_config" in arguments
        self._rest()

    def answer(self, message: dict) -> dict:
        """The responses' tokens, seconds, engine steps and accepted draft tokens, for a message of `asked`.

        The KV cache of earlier calls is cleared. Waking up and falling asleep are not timed.
        """
        if self._sleeps:
            self._llm.wake_up()
        self._llm.reset_prefix_cache()
        before, began = self._accepted(), time.perf_counter()
        tokens, steps = self._generate(message["rows"], message["sampling_params"])
        seconds = time.perf_counter() - began
        accepted = self._accepted() - before
        self._rest()
        return {"tokens": tokens, "seconds": seconds, "steps": steps, "accepted": accepted}

    def close(self) -> None:
        """vLLM ends with the process."""

    def _generate(self, rows: Sequence[dict], sampling_params: dict) -> tuple[list[list[int]], int]:
        """As LLM.generate, which counts no steps."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        done: dict[int, list[int]] = {}
        steps = 0
        for i, row in enumerate(rows):
            params = SamplingParams(
                **sampling_params,
                max_tokens=row["max_tokens"],
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(i), {"prompt_token_ids": row["prompt"]}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    done[int(output.request_id.partition("-")[0])] = list(output.outputs[0].token_ids)
            steps += 1
        return [done[i] for i in range(len(rows))], steps

    def _accepted(self) -> int:
        if not self._speculates:
            return 0
        metrics = {metric.name: metric for metric in self._llm.get_metrics()}
        accepted = metrics.get("vllm:spec_decode_num_accepted_tokens")
        return int(accepted.value) if accepted else 0

    def _rest(self) -> None:
        if self._sleeps:
            self._llm.sleep(level=1)


if __name__ == "__main__":
    serve(PlainVLLM)
