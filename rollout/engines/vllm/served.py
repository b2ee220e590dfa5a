"""Keyed requests in somebody else's vLLM server: exact reuse for trainers that own their engines.

A server that is started with `ENGINE_ARGS` samples a request whose `extra_args` hold a KeyedRequest with this package's
noise, and drafts from the texts that it brought; vLLM itself samples all others. planned_served.py does this for vLLM's
Model Runner V1, device_served.py for V2. A keyed request that cannot be served is refused alone.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from functools import wraps

import torch
import vllm
from vllm import SamplingParams as VLLMSamplingParams
from vllm import envs
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor

from specrl.rollout.engines.base import free_bytes
from specrl.rollout.engines.vllm.contract import check, differs
from specrl.rollout.engines.vllm.logits import OF_CPU_SERVER, OF_SERVER, LogitsBudget, max_draft_tokens
from specrl.rollout.engines.vllm.wire import KeyedRequest, extra_args_of
from specrl.rollout.types import RolloutError

log = logging.getLogger(__name__)

_HERE = "specrl.rollout.engines.vllm"
ENGINE_ARGS = {
    "v2": {
        "speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 32},
        "worker_cls": f"{_HERE}.device_served.KeyedWorker",
        "scheduler_cls": f"{_HERE}.device_served.KeyedScheduler",
    },
    "v1": {
        "speculative_config": {
            "method": "custom_class",
            "model": f"{_HERE}.planned_served.ServedDrafter",
            "num_speculative_tokens": 32,
        },
        "scheduler_cls": f"{_HERE}.planned_served.ServedScheduler",
    },
}
"""Arguments of a server's engine, by vLLM's model runner: V2 with Triton and vLLM 0.32, else V1.

The number bounds a row's draft in one step, up to 127. The engine's core imports this module with the scheduler's.
"""
_V1_SERVES = {
    *("n", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens"),
    *("logprobs", "prompt_logprobs", "prompt_logprob_start", "flat_logprobs", "extra_args", "output_kind"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    *("stream_interval", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache"),
}
"""Sampling params that do not change which token is sampled, or that keyed sampling on V1 obeys."""


def engine_args() -> dict:
    """Those of ENGINE_ARGS that suit this machine."""
    v2 = HAS_TRITON and envs.VLLM_USE_V2_MODEL_RUNNER is not False and not differs("v2")
    return ENGINE_ARGS["v2" if v2 else "v1"]


def weight_transfer() -> str:
    """The backend by which a trainer sends weights to a server on this machine: NCCL, or files without a GPU."""
    return "specrl" if current_platform.is_cpu() else "nccl"


def serve_by_default() -> None:
    """Every engine that this process starts by `vllm.AsyncEngineArgs` from now on serves keyed requests.

    For trainers that leave no way to set the engine's arguments. An engine that sets one of these itself keeps it.
    """
    ours = engine_args()

    class KeyedEngineArgs(vllm.AsyncEngineArgs):
        def __init__(self, *args, **options):
            if conflicts := sorted(ours.keys() & options.keys()):
                names = ", ".join(conflicts)
                log.warning("an engine sets its own %s: it will not serve keyed requests", names)
            super().__init__(*args, **({} if conflicts else deepcopy(ours)), **options)

    vllm.AsyncEngineArgs = KeyedEngineArgs  # type: ignore[misc]  # replaces vLLM's own


def logits_budget(config: VllmConfig) -> LogitsBudget:
    """By the memory that vLLM was configured to leave free, less what a trainer on the same GPU holds of it.

    The latter is known only in a process that uses the GPU: vLLM's workers may be in others.
    """
    model = config.model_config
    dtype = model.dtype
    assert isinstance(dtype, torch.dtype)  # in a configuration that vLLM has completed
    cpu = current_platform.is_cpu()

    def measure() -> int:
        free = None
        if not cpu:
            free = int(current_platform.get_device_total_memory() * (1 - config.cache_config.gpu_memory_utilization))
            if torch.cuda.is_initialized():
                free = min(free, free_bytes(torch.device("cuda", torch.cuda.current_device())))
        return max_draft_tokens(model.get_vocab_size(), free=free, width=dtype.itemsize)

    step = config.scheduler_config.max_num_batched_tokens
    return LogitsBudget(measure(), measure, step, OF_CPU_SERVER if cpu else OF_SERVER)


class BadRequest(RolloutError, VLLMValidationError):
    """A keyed request that cannot be served; the server continues."""

    def __init__(self, message: str):
        VLLMValidationError.__init__(self, message)


def admit(config: VllmConfig, request: EngineCoreRequest) -> None:
    """Raises BadRequest for a keyed request that the engine of this configuration cannot serve."""
    scheduler_cls = config.scheduler_config.scheduler_cls
    if scheduler_cls not in [arguments["scheduler_cls"] for arguments in ENGINE_ARGS.values()]:
        return  # it does not serve keyed requests
    params, prompt = request.sampling_params, request.prompt_token_ids or ()
    vocab = config.model_config.get_vocab_size()
    try:
        keyed = KeyedRequest.read(extra_args_of(request))
        if keyed is None or params is None:
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
            raise RolloutError(f"n={params.n} with one specrl_key samples one response {params.n} times. Try n=1")
        if scheduler_cls == ENGINE_ARGS["v1"]["scheduler_cls"]:
            _refuse_unknown_params(params)
    except RolloutError as error:
        raise BadRequest(str(error)) from error


def _refuse_unknown_params(params: VLLMSamplingParams) -> None:
    """Raises RolloutError for sampling params that keyed sampling on V1 does not obey; a later vLLM may add some."""
    default = VLLMSamplingParams()
    names = [name for name in params.__struct_fields__ if name not in _V1_SERVES and name[0] != "_"]
    values = {name: getattr(params, name) for name in names}
    if wrong := [f"{name}={v!r:.60}" for name, v in values.items() if v and v != getattr(default, name)]:
        raise RolloutError(
            f"a keyed request asks for {', '.join(wrong)}; on model runner V1 it is sampled by temperature, top_k, "
            "top_p and min_tokens only. Leave that out, or send it without specrl_key"
        )


_process, _preprocess = InputProcessor.process_inputs, EngineCore.preprocess_add_request
# A server's steps sample many requests together, so a bad request would end all of them, and the server.


@wraps(_process)
def process_inputs(processor: InputProcessor, *args, **options) -> EngineCoreRequest:
    """Where the process that takes requests has imported this module: the caller gets the error, over HTTP a 400."""
    request = _process(processor, *args, **options)
    admit(processor.vllm_config, request)
    return request


@wraps(_preprocess)
def preprocess_add_request(core: EngineCore, request: EngineCoreRequest):
    """Where a request reaches the engine's core: an error ends this request only, with finish reason `error`."""
    admit(core.vllm_config, request)
    return _preprocess(core, request)


check("served")
InputProcessor.process_inputs = process_inputs  # type: ignore[method-assign,assignment]  # replaces vLLM's own
EngineCore.preprocess_add_request = preprocess_add_request  # type: ignore[method-assign,assignment]  # the same
