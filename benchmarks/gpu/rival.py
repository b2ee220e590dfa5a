"""Phase 4: vLLM with its own defaults, in a process of its own, on the policy's weights and prompts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu import model as models
from benchmarks.gpu.run import Absent, Step, installed
from benchmarks.gpu.timing import Context
from benchmarks.process import Process


def steps(context: Context) -> Iterator[Step]:
    yield Step("vllm", partial(by_vllm, context))


def by_vllm(context: Context) -> dict:
    """Seconds a token of the rows that model.generate was timed with."""
    if not installed("vllm"):
        raise Absent("vllm is not installed")
    context.needs_cuda("vLLM's defaults")
    with tempfile.TemporaryDirectory() as folder:
        model = models.build(context.sizes.policy, context.device, torch.bfloat16)
        model.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
        return vllm_lines(folder, models.prompts(context.sizes), context.sizes.generate_rows)


def vllm_lines(folder: str, prompts: list[list[int]], lines: tuple[tuple[int, int], ...]) -> dict:
    """Seconds a token of the model in `folder`, for (rows, tokens) each, after a warm-up of 8 tokens."""
    settings = {"model": folder, "skip_tokenizer_init": True, "generation_config": "vllm"}
    process = Process("benchmarks.vllm_baseline", settings=settings)
    sampling_params = {"temperature": 1.0, "ignore_eos": True}
    result = {}
    try:
        for rows, tokens in lines:
            for length in (8, tokens):
                requests = [{"prompt": prompt, "max_tokens": length} for prompt in prompts[:rows]]
                done = process.ask(rows=requests, sampling_params=sampling_params)
            if (total := sum(map(len, done["tokens"]))) != tokens * rows:
                raise RuntimeError(f"vLLM gave {total} tokens instead of {tokens * rows}")
            seconds = done["seconds"]
            result[f"{rows} rows"] = {
                "tokens": tokens,
                "seconds": round(seconds, 3),
                "seconds_a_token": seconds / rows / tokens,
                "ms_a_step": round(1e3 * seconds / tokens, 3),
            }
    finally:
        process.close()
    return result
