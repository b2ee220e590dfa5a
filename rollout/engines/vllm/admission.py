"""Keyed requests at the door of a vLLM server: one that cannot be served is refused alone.

A server's steps draw many requests together, so what is wrong with one would end all of them, and the server. vLLM asks
here in two places. In the process that takes requests, where that process imports this module (an engine in process,
`serve_by_default`): its caller gets the error, an HTTP client status 400. And in the engine's core, which always
imports it: there the request alone ends, with the finish reason `error`.
"""

from __future__ import annotations

from functools import wraps

from vllm import SamplingParams as VLLMSamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor

from specrl.rollout.engines.vllm.contract import check
from specrl.rollout.engines.vllm.wire import KeyedRequest
from specrl.rollout.types import RolloutError

_HERE = "specrl.rollout.engines.vllm"
SCHEDULERS = {"v1": f"{_HERE}.admission.HostScheduler", "v2": f"{_HERE}.served_v2.KeyedScheduler"}
"""By model runner, what a server that serves keyed requests is started with: the engine's core imports it."""
_V1_SERVES = {
    *("n", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens"),
    *("logprobs", "prompt_logprobs", "prompt_logprob_start", "flat_logprobs", "extra_args", "output_kind"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    *("stream_interval", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache"),
}
"""Sampling parameters that change nothing of a draw, or that a draw on V1 obeys."""


class BadRequest(RolloutError, VLLMValidationError):
    """A keyed request that cannot be served; the server serves on."""

    def __init__(self, message: str):
        VLLMValidationError.__init__(self, message)


class HostScheduler(Scheduler):
    """vLLM's own, under a name whose import brings this module into the engine's core."""


def admit(request: EngineCoreRequest, runner: str, vocab: int) -> None:
    """Raises BadRequest for a request that a server on this model runner cannot serve with its key.

    Args: vocab: ids below it exist.
    """
    params, prompt = request.sampling_params, request.prompt_token_ids or ()
    try:
        keyed = KeyedRequest.read(params and params.extra_args)
        if keyed is None:
            return
        if keyed.prompt_tokens > len(prompt):
            raise RolloutError(
                f"specrl_prompt_tokens={keyed.prompt_tokens} of a request with {len(prompt)} prompt ids. Try "
                f"specrl_prompt_tokens={len(prompt)}, where no part of the response is sent along"
            )
        if not request.mm_features and not 0 <= min(prompt) <= max(prompt) < vocab:
            wrong = next(token for token in prompt if not 0 <= token < vocab)
            raise RolloutError(f"the prompt has the id {wrong}, outside the model's 0..{vocab - 1}")
        if params.n != 1:
            raise RolloutError(f"n={params.n} with one specrl_key draws one response {params.n} times. Try n=1")
        if runner == "v1":
            _refuse_unknown_law(params)
    except RolloutError as error:
        raise BadRequest(str(error)) from error


def _refuse_unknown_law(params: VLLMSamplingParams) -> None:
    """Raises RolloutError for sampling parameters that a keyed draw on V1 does not obey; a later vLLM may add some."""
    plain = VLLMSamplingParams()
    given = {
        name: getattr(params, name) for name in params.__struct_fields__ if name not in _V1_SERVES and name[0] != "_"
    }
    if wrong := [f"{name}={value!r:.60}" for name, value in given.items() if value and value != getattr(plain, name)]:
        raise RolloutError(
            f"a keyed request asks for {', '.join(wrong)}; on model runner V1 it is drawn by temperature, top_k, top_p "
            "and min_tokens only. Leave that out, or send it without specrl_key"
        )


def _ask(config: VllmConfig, request: EngineCoreRequest) -> None:
    """Admits a request to an engine of this configuration, if it is one that serves keyed requests."""
    for runner, name in SCHEDULERS.items():
        if config.scheduler_config.scheduler_cls == name:
            admit(request, runner, config.model_config.get_vocab_size())


_process, _preprocess = InputProcessor.process_inputs, EngineCore.preprocess_add_request


@wraps(_process)
def process_inputs(processor: InputProcessor, *args, **options) -> EngineCoreRequest:
    """Where a request comes from outside."""
    request = _process(processor, *args, **options)
    _ask(processor.vllm_config, request)
    return request


@wraps(_preprocess)
def preprocess_add_request(core: EngineCore, request: EngineCoreRequest):
    """Where a request comes to the engine's core; what is raised here ends this request only."""
    _ask(core.vllm_config, request)
    return _preprocess(core, request)


check("served")
InputProcessor.process_inputs, EngineCore.preprocess_add_request = process_inputs, preprocess_add_request
