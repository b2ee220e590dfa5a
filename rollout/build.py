"""Builds the engine of `rollout.*`, importing only what the options ask for. Only this file imports lossy/."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specrl.rollout.checks import check
from specrl.rollout.config import RolloutConfig
from specrl.rollout.types import RolloutError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specrl.rollout.drafting.drafting import Drafting
    from specrl.rollout.engines.base import Engine, EngineSpec, SamplingParams
    from specrl.rollout.lossy.judged import Judged
    from specrl.rollout.lossy.router import Scorer
    from specrl.rollout.verify import AcceptanceRule


def build_engine(spec: EngineSpec, model: PreTrainedModel | None = None, scorer: Scorer | None = None) -> Engine:
    """The engine of `rollout.engine` for the run's sampling and `rollout.acceptance`.

    Args:
        spec: what to build.
        model: the trainer's own model, which the transformers engine shares; None loads `spec.model`.
        scorer: process rewards of draft steps, for `rollout.routed.by=rsd`.

    Raises:
        RolloutError: an option has an illegal value, or what it names cannot be loaded.
    """
    from specrl.rollout.engines.base import Limits, SamplingParams

    config = spec.rollout
    check(config)
    sampling = SamplingParams(spec.eos_ids, config.temperature, config.top_k, config.top_p)
    if config.engine == "vllm":
        return _vllm_engine(spec, sampling)
    from specrl.rollout.engines.local.engine import TransformersEngine

    policy = spec.load(spec.model) if model is None else model
    limits = Limits.of(config)
    own_weights = model is None
    drafter = None
    if config.drafter:
        from specrl.rollout.engines.local.head import load_drafter

        drafter = load_drafter(spec, policy)
    if config.acceptance == "judged":
        judged = _judged(config, sampling, policy, drafter)
        return TransformersEngine(policy, sampling, judged.rule, judged, limits, own_weights)
    if config.acceptance == "routed":
        from specrl.rollout.lossy.routed import RoutedEngine
        from specrl.rollout.lossy.router import build_router

        assert drafter is not None, "rollout.checks asks for rollout.drafter"
        router, step_end = build_router(config.routed, spec, policy, drafter, scorer)
        return RoutedEngine(
            policy,
            sampling,
            draft=drafter,
            router=router,
            step_end=step_end,
            limits=limits,
            own_weights=own_weights,
        )
    return TransformersEngine(policy, sampling, *rule_and_drafting(config, sampling, drafter), limits, own_weights)


def _vllm_engine(spec: EngineSpec, sampling: SamplingParams) -> Engine:
    config = spec.rollout
    try:
        from specrl.rollout.engines.vllm.engine import VLLMEngine
    except ImportError as error:
        raise RolloutError(
            f"rollout.engine=vllm needs vLLM: {error}. Install it with: pip install 'specrl[vllm]'"
        ) from error
    if config.acceptance == "judged":  # the head is for one policy, whose weights are read to compare
        judged = _judged(config, sampling, replace(spec, device="cpu").load(spec.model), None)
        return VLLMEngine(spec, sampling, judged.rule, judged)
    return VLLMEngine(spec, sampling, *rule_and_drafting(config, sampling))


def _judged(
    config: RolloutConfig, sampling: SamplingParams, policy: PreTrainedModel, drafter: PreTrainedModel | None
) -> Judged:
    from specrl.rollout.engines.base import Limits
    from specrl.rollout.lossy.judge import build_judge
    from specrl.rollout.lossy.judged import DRAFT_TOKENS, Judged

    window = config.budget.window or DRAFT_TOKENS
    return Judged(build_judge(config.judged, policy), sampling, drafter, window, Limits.of(config))


def rule_and_drafting(
    config: RolloutConfig, sampling: SamplingParams, drafter: PreTrainedModel | None = None
) -> tuple[AcceptanceRule, Drafting]:
    """The acceptance rule and the drafting of exact, off and lenient. Args: drafter: a draft model, loaded."""
    from specrl.rollout.drafting.budget import Budget
    from specrl.rollout.drafting.contexts import ContextTable
    from specrl.rollout.drafting.drafting import Drafting
    from specrl.rollout.verify import exact

    if config.acceptance == "lenient":
        from specrl.rollout.lossy.lenient import VerifyOldTextOnce, lenient

        return lenient(config.lenience), VerifyOldTextOnce()
    model = None
    if drafter is not None:
        from specrl.rollout.engines.base import Limits
        from specrl.rollout.engines.local.head import drafter_of

        model = drafter_of(drafter, sampling, Limits.of(config), config.local.drafter_vocab)
    contexts = ContextTable() if "contexts" in config.sources else None
    return exact, Drafting(Budget(config.budget.window), contexts, model, "redraw" in config.sources)
