"""From `rollout.*` to an engine. Each is imported only when it is asked for, and only here anything of lossy/."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rollout.checks import check
from rollout.config import RolloutConfig
from rollout.types import RolloutError

if TYPE_CHECKING:
    from torch.nn import Module

    from rollout.drafting.drafting import Drafting
    from rollout.engines.base import Engine, EngineSpec, Sampling
    from rollout.lossy.judged import Judged
    from rollout.lossy.router import Scorer
    from rollout.verify import Rule


def build_engine(spec: EngineSpec, model: Module | None = None, scorer: Scorer | None = None) -> Engine:
    """The engine of `rollout.engine` for the run's sampling and `rollout.law`.

    Args:
        spec: what to build.
        model: the trainer's own model, which the transformers engine then shares; None loads `spec.model`.
        scorer: process rewards of draft steps, for `rollout.routed.by=rsd`.

    Raises:
        RolloutError: an option has a value that it cannot have, or what it names cannot be loaded.
    """
    from rollout.engines.base import Limits, Sampling

    config = spec.rollout
    check(config)
    sampling = Sampling(spec.eos_ids, config.temperature, config.top_k, config.top_p)
    if config.engine == "vllm":
        try:
            from rollout.engines.vllm.engine import VLLMEngine
        except ImportError as error:
            raise RolloutError(
                f"rollout.engine=vllm needs vLLM: {error}. Install it with: pip install 'specrl[vllm]'"
            ) from error
        if config.law == "judged":  # the head is for one policy, whose weights are read to compare
            judged = _judged(config, sampling, replace(spec, device="cpu").load(spec.model), None)
            return VLLMEngine(spec, sampling, judged.rule, judged)
        return VLLMEngine(spec, sampling, *rule_and_drafting(config, sampling))
    from rollout.engines.local.engine import TransformersEngine

    policy = spec.load(spec.model) if model is None else model
    options = {"limits": Limits.of(config), "own_weights": model is None}
    drafter = None
    if config.drafter:
        from rollout.drafter import load_drafter, refuse_head

        drafter = load_drafter(spec, policy)
        if config.law in ("judged", "routed"):
            refuse_head(drafter, config.law)
    if config.law == "judged":
        judged = _judged(config, sampling, policy, drafter)
        return TransformersEngine(policy, sampling, judged.rule, judged, **options)
    if config.law == "routed":
        from rollout.lossy.build import build_router
        from rollout.lossy.routed import RoutedEngine, Steps

        router, step_end = build_router(config.routed, spec, policy, drafter, scorer)
        return RoutedEngine(policy, sampling, Steps(drafter, router, step_end), **options)
    return TransformersEngine(policy, sampling, *rule_and_drafting(config, sampling, drafter), **options)


def _judged(config: RolloutConfig, sampling: Sampling, policy: Module, drafter: Module | None) -> Judged:
    from rollout.engines.base import Limits
    from rollout.lossy.build import build_judge
    from rollout.lossy.judged import DRAFT_TOKENS, Judged

    window = config.budget.window or DRAFT_TOKENS
    return Judged(build_judge(config.judged, policy), sampling, drafter, window, Limits.of(config))


def rule_and_drafting(
    config: RolloutConfig, sampling: Sampling, drafter: Module | None = None
) -> tuple[Rule, Drafting]:
    """What stands and what rides under the laws exact, off and lenient. Args: drafter: a draft model, loaded."""
    from rollout.drafting.budget import Budget
    from rollout.drafting.contexts import ContextTable
    from rollout.drafting.drafting import Drafting
    from rollout.verify import exact

    if config.law == "lenient":
        from rollout.lossy.lenient import Once, lenient

        return lenient(config.lenience), Once()
    model = None
    if drafter is not None:
        from rollout.engines.base import Limits
        from rollout.engines.local.head import drafter_of

        model = drafter_of(drafter, sampling, Limits.of(config), config.local.drafter_vocab)
    contexts = ContextTable() if "contexts" in config.sources else None
    return exact, Drafting(Budget(config.budget.window), contexts, model, "redraw" in config.sources)
