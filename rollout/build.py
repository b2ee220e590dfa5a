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
    from specrl.rollout.engines.local.engine import TransformersEngine
    from specrl.rollout.engines.vllm.engine import VLLMEngine
    from specrl.rollout.lossy.judged import Judged
    from specrl.rollout.verify import AcceptanceRule


def build_engine(spec: EngineSpec, model: PreTrainedModel | None = None) -> Engine:
    """The engine of `rollout.engine` for the run's sampling and `rollout.acceptance`.

    Args:
        spec: what to build.
        model: the trainer's own model, which the transformers engine shares; None loads `spec.model`.

    Raises:
        RolloutError: an option has an illegal value, or what it names cannot be loaded.
    """
    config = spec.rollout
    check(config)
    sampling = _sampling(spec)
    if config.acceptance == "routed":
        return _routed_engine(spec, model)
    if config.engine == "vllm":
        if config.acceptance == "judged":  # the head is for one policy, whose weights are read to compare
            judged = _judged(config, sampling, replace(spec, device="cpu").load(spec.model), None)
            return _vllm_engine(spec, sampling, judged.rule, judged)
        return _vllm_engine(spec, sampling, *rule_and_drafting(config, sampling))
    from specrl.rollout.engines.local.engine import TransformersEngine

    policy = spec.load(spec.model) if model is None else model
    own_weights = model is None
    drafter = None
    if config.drafter:
        from specrl.rollout.engines.local.head import load_drafter

        drafter = load_drafter(spec, policy)
    if config.acceptance == "judged":
        judged = _judged(config, sampling, policy, drafter)
        return TransformersEngine(policy, sampling, judged.rule, judged, config, own_weights)
    return TransformersEngine(policy, sampling, *rule_and_drafting(config, sampling, drafter), config, own_weights)


def build_policy(spec: EngineSpec, model: PreTrainedModel | None = None) -> TransformersEngine | VLLMEngine:
    """The engine of a RoutedRollout's policy. Args: see `build_engine`."""
    from specrl.rollout.lossy.text import ReadOrVerify

    sampling, texts = _sampling(spec), ReadOrVerify()
    if spec.rollout.engine == "vllm":
        return _vllm_engine(spec, sampling, texts.rule, texts)
    from specrl.rollout.engines.local.engine import TransformersEngine

    policy = spec.load(spec.model) if model is None else model
    return TransformersEngine(policy, sampling, texts.rule, texts, spec.rollout, own_weights=model is None)


def _routed_engine(spec: EngineSpec, model: PreTrainedModel | None) -> Engine:
    """A policy and a draft of the same make."""
    from specrl.rollout.drafting.drafting import check_vocab
    from specrl.rollout.engines.local.engine import TransformersEngine
    from specrl.rollout.engines.local.head import check_writes_text, load_drafter
    from specrl.rollout.lossy.arbitrage import build_router
    from specrl.rollout.lossy.routed import RoutedRollout

    config = spec.rollout
    check_writes_text(config)
    vllm = replace(config.vllm, memory_utilization=config.vllm.memory_utilization / 2)
    alone = replace(config, drafter="", vllm=vllm)
    policy = build_policy(replace(spec, rollout=alone), model)
    draft: TransformersEngine | VLLMEngine
    if isinstance(policy, TransformersEngine):
        draft = TransformersEngine(load_drafter(spec, policy.model), policy.sampling, limits=policy.limits)
    else:
        awake = replace(vllm, sleep=False)  # when one engine of a process sleeps, all that sleep lose their memory
        drafting = replace(alone, acceptance="off", vllm=awake)
        of_draft = replace(spec, model=config.drafter, revision="", rollout=drafting)
        draft = _vllm_engine(of_draft, policy.sampling, *rule_and_drafting(drafting, policy.sampling))
    check_vocab(draft.vocab, policy.vocab)
    return RoutedRollout(policy, draft, *build_router(spec))


def _sampling(spec: EngineSpec) -> SamplingParams:
    from specrl.rollout.engines.base import SamplingParams

    return SamplingParams(spec.eos_ids, spec.rollout.temperature, spec.rollout.top_k, spec.rollout.top_p)


def _vllm_engine(spec: EngineSpec, sampling: SamplingParams, rule: AcceptanceRule, drafting: Drafting) -> VLLMEngine:
    try:
        from specrl.rollout.engines.vllm.engine import VLLMEngine
    except ImportError as error:
        raise RolloutError(
            f"rollout.engine=vllm needs vLLM: {error}. Install it with: pip install 'specrl[vllm]'"
        ) from error
    return VLLMEngine(spec, sampling, rule, drafting)


def _judged(
    config: RolloutConfig, sampling: SamplingParams, policy: PreTrainedModel, drafter: PreTrainedModel | None
) -> Judged:
    from specrl.rollout.lossy.judge import JudgeHead
    from specrl.rollout.lossy.judged import DRAFT_TOKENS, Judged
    from specrl.rollout.lossy.pair import fingerprint

    window = config.draft_tokens or DRAFT_TOKENS
    judge = JudgeHead.load(config.trained, policy=fingerprint(policy))
    return Judged(judge, sampling, drafter, window, config)


def rule_and_drafting(
    config: RolloutConfig, sampling: SamplingParams, drafter: PreTrainedModel | None = None
) -> tuple[AcceptanceRule, Drafting]:
    """The acceptance rule and the drafting of exact, off and lenient. Args: drafter: a draft model, loaded."""
    from specrl.rollout.drafting.budget import Budget
    from specrl.rollout.drafting.drafting import Drafting
    from specrl.rollout.verify import exact

    if config.acceptance == "lenient":
        from specrl.rollout.lossy.lenient import VerifyOldTextOnce, lenient

        return lenient(config.lenience), VerifyOldTextOnce()
    model = None
    if drafter is not None:
        from specrl.rollout.drafting.frequent import FREQUENT_IDS
        from specrl.rollout.engines.local.head import drafter_of

        model = drafter_of(drafter, sampling, config, FREQUENT_IDS)
    return exact, Drafting(Budget(config.draft_tokens), model)
