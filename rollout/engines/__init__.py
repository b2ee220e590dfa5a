"""Engines by name. Each is imported only when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.checks import check
from rollout.config import RolloutConfig
from rollout.types import RolloutError

if TYPE_CHECKING:
    from torch.nn import Module

    from rollout.engines.base import Engine
    from rollout.routers.base import Scorer


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
    tokenizer: str = ""
    """Directory or hub id; empty takes the model's. Only routers need text."""


def build_engine(spec: EngineSpec, model: Module | None = None, scorer: Scorer | None = None) -> Engine:
    """The engine of `rollout.engine` for the run's sampling and `rollout.law`.

    Args:
        spec: what to build.
        model: the trainer's own model, which the transformers engine then shares; None loads `spec.model`.
        scorer: process rewards of draft steps, for `rollout.routed.by=rsd`.

    Raises:
        RolloutError: an option has a value that it cannot have, or what it names cannot be loaded.
    """
    from rollout.engines.base import Sampling, Speculation

    config = spec.rollout
    check(config)
    sampling = Sampling(spec.eos_ids, config.temperature, config.top_k, config.top_p)
    speculation = Speculation("lenient" if config.law == "lenient" else "exact", config.lenience)
    if config.engine == "vllm":
        try:
            from rollout.engines.vllm import VLLMEngine
        except ImportError as error:
            raise RolloutError(
                f"rollout.engine=vllm needs vLLM: {error}. Install it with: pip install 'specrl[vllm]'"
            ) from error
        return VLLMEngine(spec, sampling, speculation)
    from rollout.engines.transformers import TransformersEngine

    policy = _load(spec, spec.model) if model is None else model
    bounds = {
        "own_weights": model is None,
        "rows_per_batch": config.rows_per_batch,
        "tokens_per_pass": config.tokens_per_pass,
        "logits_mb": config.logits_mb,
        "tie_margin": config.tie_margin,
    }
    drafter = load_drafter(spec, policy) if config.drafter else None
    if config.law == "judged":
        from rollout.engines.judged import DRAFT_TOKENS, JudgedEngine
        from rollout.routers import build_judge

        judge, window = build_judge(config.judged, policy), config.budget.window or DRAFT_TOKENS
        return JudgedEngine(policy, sampling, judge=judge, draft=drafter, window=window, **bounds)
    if config.law == "routed":
        from rollout.engines.routed import RoutedEngine
        from rollout.routers import build_router

        router, step_end = build_router(config.routed, spec, policy, drafter, scorer)
        return RoutedEngine(policy, sampling, draft=drafter, router=router, step_end=step_end, **bounds)
    contexts = speculation.rule == "exact" and "contexts" in config.sources
    budget = {"window": config.budget.window, "branches": config.budget.branches}
    return TransformersEngine(policy, sampling, speculation, drafter=drafter, contexts=contexts, **budget, **bounds)


def load_drafter(spec: EngineSpec, policy: Module) -> Module:
    """The draft model of `rollout.drafter`: the policy's first layers, or a model of its own."""
    from rollout.drafters.model import early_exit

    name, equals, layers = spec.rollout.drafter.partition("=")
    if name == "layers" and equals:
        if not layers.isdecimal():
            raise RolloutError(f"rollout.drafter={spec.rollout.drafter} names no number of layers. Try layers=2")
        return early_exit(policy.get_base_model() if hasattr(policy, "get_base_model") else policy, int(layers))
    try:
        return _load(spec, spec.rollout.drafter)
    except (OSError, ValueError) as error:
        missing = "" if Path(spec.rollout.drafter).is_dir() else "there is no such directory, and "
        raise RolloutError(
            f"rollout.drafter={spec.rollout.drafter} cannot be loaded: {missing}{str(error).strip().splitlines()[0]} "
            "Give a model directory, such as `python -m specrl.drafter out=DIR` writes, or layers=N"
        ) from error


def _load(spec: EngineSpec, source: str) -> Module:
    import torch
    from transformers import AutoModelForCausalLM

    own = source == spec.model
    model = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=getattr(torch, spec.dtype),
        revision=(spec.revision or None) if own else None,
        trust_remote_code=spec.trust_remote_code,
    )
    return model.eval().to(spec.device)
