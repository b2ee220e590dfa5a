"""Engines by name. Each is imported only when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.config import RolloutConfig
from rollout.types import RolloutError

if TYPE_CHECKING:
    from torch.nn import Module

    from rollout.engines.base import Engine


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Everything an engine is built from, here or in a worker process."""

    eos_ids: frozenset[int]
    rollout: RolloutConfig
    model: str = ""
    """Directory or hub id of the model, for engines that load their own."""
    dtype: str = "float32"
    device: str = "cpu"
    revision: str = ""
    trust_remote_code: bool = False


def build_engine(spec: EngineSpec, model: Module | None = None) -> Engine:
    """The engine of `rollout.engine` with the run's sampling law and acceptance rule.

    Args:
        spec: what to build.
        model: the trainer's own model, which the transformers engine then shares; None loads `spec.model`.
    """
    from rollout.engines.base import Sampling, Speculation

    config = spec.rollout
    sampling = Sampling(spec.eos_ids, config.temperature, config.top_k, config.top_p)
    speculation = Speculation("lenient" if config.acceptance == "lenient" else "exact", config.lenience)
    if config.engine == "vllm":
        try:
            from rollout.engines.vllm import VLLMEngine
        except ImportError as error:
            raise RolloutError(
                f"rollout.engine=vllm needs vLLM: {error}. Install it with: pip install 'specrl[vllm]'"
            ) from error
        return VLLMEngine(spec, sampling, speculation)
    from rollout.engines.transformers import TransformersEngine

    return TransformersEngine(
        _load(spec) if model is None else model,
        sampling,
        speculation,
        own_weights=model is None,
        rows_per_batch=config.rows_per_batch,
        tokens_per_pass=config.tokens_per_pass,
        logits_mb=config.logits_mb,
        tie_margin=config.tie_margin,
        window=config.budget.window,
    )


def _load(spec: EngineSpec) -> Module:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        spec.model,
        dtype=getattr(torch, spec.dtype),
        revision=spec.revision or None,
        trust_remote_code=spec.trust_remote_code,
    )
    return model.eval().to(spec.device)
