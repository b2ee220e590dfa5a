"""The run's settings as vLLM takes them, and which of its model runners can serve them."""

from __future__ import annotations

import os

import torch
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON

from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec, SamplingParams
from specrl.rollout.engines.local.head import is_head
from specrl.rollout.engines.vllm.contract import differs
from specrl.rollout.engines.vllm.planned_v2 import MODEL_TOKENS
from specrl.rollout.types import RolloutError

CPU_KV_MB = 512
DRAFT_TOKENS = 32
"""Most draft tokens of a row in one step, where `rollout.draft_tokens` is 0."""
_HOOKS = "specrl.rollout.engines.vllm"


def settings(spec: EngineSpec) -> dict:
    """The run's settings as vLLM's LLM takes them, without drafts and hooks."""
    config, vllm = spec.rollout, spec.rollout.vllm
    cpu = current_platform.is_cpu()
    kv_mb = config.kv_cache_mb or (CPU_KV_MB if cpu else 0)
    # a CPU's default block of 128 tokens would cache little
    platform = {"block_size": 32} if cpu else {"enable_sleep_mode": vllm.sleep}
    return {
        "model": spec.model,
        "revision": spec.revision or None,
        "trust_remote_code": spec.trust_remote_code,
        "dtype": spec.dtype,
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "generation_config": "vllm",  # the run's settings decide, not the checkpoint's
        "max_model_len": -1,  # the model's, or what the KV cache holds
        "max_num_seqs": min(config.rows_per_batch, config.tokens_per_pass),
        "max_num_batched_tokens": config.tokens_per_pass,
        "kv_cache_memory_bytes": kv_mb * 2**20 or None,
        "gpu_memory_utilization": vllm.memory_utilization,
        "tensor_parallel_size": vllm.tensor_parallel,
        "enforce_eager": vllm.compile == "off" or (vllm.compile == "auto" and cpu),  # a CPU compiles for a minute
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",  # rows of the next batch are preempted first
        "seed": 0,
        **platform,
    }


def executor(tensor_parallel: int) -> dict:
    """How vLLM's workers are launched: where the trainer has several ranks, the engine of each joins their group.

    Otherwise vLLM would take the first GPU of its machine on every rank.

    Args:
        tensor_parallel: GPUs of an engine.

    Raises:
        RolloutError: the ranks cannot have an engine each; the message says what would work.
    """
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if ranks == 1:
        return {}
    if tensor_parallel > 1:
        raise RolloutError(
            f"rollout.vllm.tensor_parallel={tensor_parallel} splits an engine over GPUs that belong to the {ranks} "
            "processes of the trainer. Use rollout.vllm.tensor_parallel=1, or cluster.num_workers=1 for an "
            "engine that has its own GPUs"
        )
    rank = torch.distributed.get_rank()
    launched = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK")}
    process = f"process {rank} of {ranks}"
    right = launched["RANK"] == str(rank) and bool(launched["LOCAL_RANK"])
    if torch.cuda.is_available():
        gpu = str(torch.cuda.current_device())
        process += f" on GPU {gpu}"
        right = right and launched["LOCAL_RANK"] == gpu
    if not right:
        raise RolloutError(
            f"vLLM takes the GPU of a process by RANK and LOCAL_RANK, which are {launched} in {process}. Launch with "
            "torchrun or accelerate launch, which set them"
        )
    return {"distributed_executor_backend": "external_launcher"}


def choose_runner(spec: EngineSpec, sampling: SamplingParams) -> str:
    """v1 or v2: what the settings ask for, if this vLLM on this machine can do it.

    Raises:
        RolloutError: it cannot; the message says what would work.
    """
    vllm = spec.rollout.vllm
    no_v1 = ""
    if spec.rollout.vllm.on_device:
        no_v1 = f"{spec.rollout.vllm.on_device} leaves drafts to the device, which v1 asks the host for"
    elif spec.rollout.planned:
        no_v1 = f"{spec.rollout.planned} needs drafts that come with the plan of a step"
    if not HAS_TRITON:
        no_v2 = "it needs a GPU, or Triton"
    elif spec.rollout.lossy:
        no_v2 = f"its workers accept drafts, and rollout.acceptance={spec.rollout.acceptance} does so in this process"
    elif not (no_v2 := differs("v2")):  # vLLM raises smaller temperatures to this
        no_v2 = f"it samples at rollout.temperature=0 or 0.01 and more, not {sampling.temperature}"
        no_v2 *= 0 < sampling.temperature < 0.01
    reasons = {"v2": no_v2, "v1": no_v1}
    possible = [runner for runner, reason in reasons.items() if not reason]
    chosen = (possible or ["v1"])[0] if vllm.runner == "auto" else vllm.runner
    if reasons[chosen]:
        remedy = f"use rollout.vllm.runner={possible[0]}" if possible else f"nor does v2: {no_v2}"
        raise RolloutError(f"rollout.vllm.runner={chosen} does not work here: {reasons[chosen]}; {remedy}")
    return chosen


def draft_tokens(rollout: RolloutConfig) -> int:
    """Most draft tokens of a row in one step. Where drafting is on the device, a draft model proposes so many in every
    step, each in a pass of its own."""
    most = rollout.draft_tokens or DRAFT_TOKENS
    without_model = "device", "ngram_gpu"
    by_model = rollout.vllm.on_device and (rollout.drafter or rollout.vllm.speculator not in without_model)
    return min(most, MODEL_TOKENS) if by_model else most


def speculation(spec: EngineSpec, runner: str) -> dict:
    """The arguments of LLM that concern drafts."""
    vllm, drafter = spec.rollout.vllm, spec.rollout.drafter
    drafts: dict = {"num_speculative_tokens": draft_tokens(spec.rollout)}
    if runner == "v1":
        drafts |= {"method": "custom_class", "model": f"{_HOOKS}.planned_v1.KeyedDrafter"}
        return {"speculative_config": drafts, "scheduler_cls": f"{_HOOKS}.planned.PlannedScheduler"}
    if drafter:
        name = "eagle" if is_head(drafter) else "draft_model"
        model = drafter
    else:
        name, _, model = vllm.speculator.partition("=")
    drafts["method"] = "ngram_gpu" if name in ("texts", "device") else name  # needs no model; DeviceTexts replaces it
    if model:
        drafts["model"] = model
    scheduler = "device_scheduler.DraftScheduler" if spec.rollout.vllm.on_device else "planned.PlannedScheduler"
    return {
        "speculative_config": drafts,
        "async_scheduling": bool(spec.rollout.vllm.on_device),
        "scheduler_cls": f"{_HOOKS}.{scheduler}",
        "logprobs_mode": "processed_logprobs",
    }
