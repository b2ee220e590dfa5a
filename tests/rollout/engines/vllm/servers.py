"""A plain vLLM server in this process, and requests to it by vLLM's own API."""

from copy import deepcopy

import pytest
import torch

from specrl.rollout.engines.vllm.wire import KeyedRequest
from specrl.rollout.types import Request
from tests.rollout.engines.vllm.engines import RUNNER, spec_of
from tests.rollout.golden import EOS_IDS


class Served:
    """A vLLM engine with a step counter, and plain requests to it."""

    def __init__(self, llm, model):
        self.llm, self.model, self.steps = llm, model, 0
        self.core = llm.llm_engine.engine_core.engine_core
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.flow = self.core.scheduler.drafts
        self.flow.drafting.budget.window = 8  # independent of the costs of passes

    def ask(self, requests: list[Request], texts=None, keyed: bool = True, **params) -> list:
        """vLLM's outputs. texts: one earlier response for each request; keyed: False lets vLLM sample."""
        texts = [[t] for t in texts] if texts else [[]] * len(requests)
        return self.ask_with(
            [
                (list(r.prompt), self.params(r, known, **params) if keyed else self.vllm_params(r, **params))
                for r, known in zip(requests, texts, strict=True)
            ]
        )

    def params(self, request: Request, texts=(), prompt_tokens=None, plain=False, **params):
        texts = tuple(map(tuple, texts))
        prompt_tokens = prompt_tokens or len(request.prompt)
        wire = KeyedRequest(request.key, prompt_tokens, str(request.key), texts, 0 if texts else -1, plain)
        return self.vllm_params(request, extra_args=wire.extra_args(), **params)

    @staticmethod
    def vllm_params(request: Request, **params):
        from vllm import SamplingParams

        shape = {"max_tokens": request.max_new_tokens, "stop_token_ids": list(EOS_IDS), "ignore_eos": True}
        return SamplingParams(**{**shape, "detokenize": False, "logprobs": 0, **params})

    def ask_with(self, prompts_and_params) -> list:
        engine, done, self.steps = self.llm.llm_engine, {}, 0
        for i, (prompt, params) in enumerate(prompts_and_params):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            self.steps += 1
            done |= {int(output.request_id): output.outputs[0] for output in engine.step() if output.finished}
        return [done[i] for i in range(len(prompts_and_params))]


def tokens(outputs) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def logprobs(output) -> list[float]:
    return [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]


def start_served(path, arguments: dict, made=None):
    """vLLM's LLM, started as a user starts it. Args: made: a class of its own."""
    from specrl.rollout.engines.vllm.engine import LLM, settings

    # vLLM replaces torch.set_num_threads when it starts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gc.collect", lambda *_: 0)
        patch.setattr("torch.set_num_threads", torch.set_num_threads)
        if RUNNER == "v2":
            keep_async(patch)
        return (made or LLM)(**settings(spec_of(path)), **arguments)


def keep_async(patch) -> None:
    """Keeps asynchronous scheduling, which vLLM disables on a CPU."""
    from vllm.platforms.cpu import CpuPlatform

    configure = CpuPlatform.check_and_update_config

    def configure_all_else(config):
        scheduling = config.scheduler_config.async_scheduling
        configure(config)
        config.scheduler_config.async_scheduling = scheduling

    patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(configure_all_else))


def arguments() -> dict:
    """ENGINE_ARGS with shorter drafts."""
    from specrl.rollout.engines.vllm.served import ENGINE_ARGS

    shorter = deepcopy(ENGINE_ARGS[RUNNER])
    shorter["speculative_config"]["num_speculative_tokens"] = 8
    return shorter
