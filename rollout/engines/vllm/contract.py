"""The internal names of vLLM that this package relies on, with their arguments.

They are no public interface, so another version may lack one. Then nothing starts, and the message names it.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import vllm

from specrl.rollout.types import RolloutError

_GPU = "vllm.v1.worker.gpu."
_SCHEDULER = "vllm.v1.core.sched."
_SERVED = {
    "vllm.v1.engine.core:EngineCore": "preprocess_add_request vllm_config",
    "vllm.v1.engine.core:EngineCore.preprocess_add_request": "self request",
    "vllm.v1.engine.input_processor:InputProcessor": "process_inputs vllm_config",
    "vllm.v1.engine:EngineCoreRequest": "sampling_params prompt_token_ids mm_features",
    "vllm.v1.outputs:ModelRunnerOutput": "req_id_to_index sampled_token_ids",
    "vllm.v1.request:Request": "num_computed_tokens num_tokens priority",
    f"{_SCHEDULER}scheduler:Scheduler": "requests grammar_compile_error_reqs",
    f"{_SCHEDULER}scheduler:Scheduler.add_request": "self request",
    f"{_SCHEDULER}scheduler:Scheduler.make_spec_decoding_stats": (
        "self spec_decoding_stats num_draft_tokens num_accepted_tokens num_invalid_spec_tokens request_id"
    ),
    f"{_SCHEDULER}scheduler:Scheduler.update_from_output": "self scheduler_output model_runner_output",
}
_PLANNED = {
    f"{_SCHEDULER}output:SchedulerOutput": (
        "num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens num_spec_tokens_to_schedule"
    ),
    f"{_SCHEDULER}scheduler:Scheduler.update_draft_token_ids": "self draft_token_ids",
    f"{_SCHEDULER}scheduler:Scheduler.update_from_output": "self scheduler_output model_runner_output",
}
_V1 = {
    **_PLANNED,
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample": "self logits spec_decode_metadata",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
        "input_batch requests discard_request_mask effective_drafter_max_model_len drafter compute_logits"
    ),
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": "sampling_params num_tokens",
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": "num_draft_tokens draft_token_ids",
    "vllm.v1.outputs:SamplerOutput": "sampled_token_ids logprobs_tensors",
}
_V2 = {
    **_PLANNED,
    f"{_GPU}spec_decode.ngram.speculator:NgramGPUSpeculator": "propose",
    f"{_GPU}sample.sampler:Sampler.__call__": "self logits input_batch",
    f"{_GPU}sample.sampler:Sampler.sample": (
        "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
        "seq_lens_upper_bound_np return_logprobs"
    ),
    f"{_GPU}sample.sampler:Sampler._sample_random": (
        "self processed_logits expanded_idx_mapping idx_mapping_np pos top_k top_p use_fused_sampler"
    ),
    f"{_GPU}spec_decode.rejection_sampler:RejectionSampler.__call__": (
        "self logits input_batch draft_logits invalid_drafts"
    ),
    f"{_GPU}spec_decode.rejection_sampler:RejectionSampler._verify": (
        "self logits draft_logits draft_sampled pos cu_num_logits idx_mapping idx_mapping_np expanded_idx_mapping "
        "expanded_local_pos seq_lens_upper_bound_np verify_draft_sampled"
    ),
    f"{_GPU}spec_decode.rejection_sampler:RejectionSampler._get_logprobs_tensors": (
        "self sampled num_sampled logits cu_num_logits cu_num_logits_np max_num_logprobs"
    ),
    "vllm.v1.outputs:LogprobsTensors": (
        "logprob_token_ids logprobs selected_token_ranks cu_num_generated_tokens cu_num_generated_tokens_tensor"
    ),
    f"{_GPU}spec_decode.speculator:BaseSpeculator.propose": (
        "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled num_rejected "
        "last_sampled next_prefill_tokens temperature seeds dp_sync_state dummy_run skip_attn_for_dummy_run mm_inputs "
        "is_profile num_speculative_tokens"
    ),
    f"{_GPU}spec_decode.speculator:BaseSpeculator.init_cudagraph_manager": "self cudagraph_mode",
    f"{_GPU}spec_decode.speculator:DraftModelSpeculator.sample_draft": (
        "self hidden_states sample_src_positions idx_mapping temperature seeds draft_step draft_logits spec_step_idx"
    ),
    f"{_GPU}spec_decode.speculator:DraftModelSpeculator.compute_draft_logits": "self hidden_states spec_step_idx",
    f"{_GPU}spec_decode.standalone_ar.speculator:StandaloneARSpeculator": "num_speculative_steps",
    f"{_GPU}model_runner:GPUModelRunner": "compute_logits get_draft_model vocab_size",
    f"{_GPU}model_runner:GPUModelRunner.take_draft_token_ids": "self",
    f"{_GPU}model_runner:GPUModelRunner.update_requests": "self scheduler_output",
    f"{_GPU}model_states.interface:ModelState.add_request": "self req_index new_req_data",
    f"{_GPU}input_batch:InputBatch": "idx_mapping_np num_tokens is_prefilling_np prefill_len_np cu_num_logits_np",
    f"{_GPU}states:RequestState": "prompt_len total_len all_token_ids req_id_to_index draft_tokens",
    f"{_GPU}sample.states:SamplingStates": "temperature top_k vocab_size",
    "vllm.v1.worker.gpu_worker:Worker": "weight_transfer_engine get_draft_model",
    "vllm.v1.worker.gpu_worker:Worker.load_model": "self load_dummy_weights",
    f"{_SCHEDULER}async_scheduler:AsyncScheduler._update_after_schedule": "self scheduler_output",
    f"{_SCHEDULER}async_scheduler:AsyncScheduler._update_request_with_output": "self request new_token_ids is_stale",
}
NAMES = {"served": _SERVED, "v1": _V1, "v2": _V2}
"""By model runner: `module:name`, and the arguments of a function or names that a class must have, in this order."""


def check(runner: str) -> None:
    """Raises RolloutError naming what the installed vLLM lacks or has otherwise."""
    if difference := differs(runner):
        other = "rollout.vllm.runner=v1" if runner == "v2" else "rollout.engine=transformers"
        raise RolloutError(f"{difference}. Install vllm==0.32.0, or take {other}")


def differs(runner: str) -> str:
    """What the installed vLLM lacks or has otherwise, as a clause of a message; empty if it has everything."""
    for path, words in NAMES[runner].items():
        if how := _how_it_differs(path, words.split()):
            return f"vllm {vllm.__version__}: {path.replace(':', '.')} {how}, and specrl relies on it"
    return ""


def _how_it_differs(path: str, wanted: list[str]) -> str:
    module, _, names = path.partition(":")
    try:
        target: Any = import_module(module)
        for name in names.split("."):
            target = getattr(target, name)
    except (ImportError, AttributeError):
        return "is not there"
    if inspect.isclass(target):
        source = inspect.getsource(target)  # attributes that a constructor sets are found nowhere else
        missing = [name for name in wanted if not re.search(rf"\b{name}\b", source)]
        return f"has no {missing[0]}" if missing else ""
    arguments = list(inspect.signature(target).parameters)
    return f"has ({', '.join(arguments)})" if arguments != wanted else ""
