"""Routers and judges by name."""

from __future__ import annotations

from torch.nn import Module
from transformers import AutoTokenizer

from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.lossy.judge import Judge, JudgeHead, KLJudge
from specrl.rollout.lossy.pair import fingerprint
from specrl.rollout.lossy.router import SERVED, Router, Scorer, by_reward, load_learned
from specrl.rollout.lossy.steps import StepEnd
from specrl.rollout.sections import JudgedConfig, RoutedConfig
from specrl.rollout.types import RolloutError


def build_router(
    config: RoutedConfig, spec: EngineSpec, policy: Module, draft: Module | None, scorer: Scorer | None
) -> tuple[Router, StepEnd]:
    """The router of `rollout.routed` and where its steps end.

    Raises:
        RolloutError: no draft model, no process reward for rsd, or a learned router of another pair.
    """
    if draft is None:
        raise RolloutError(f"rollout.routed.by={config.by} needs a model that writes steps: set rollout.drafter")
    tokenizer = AutoTokenizer.from_pretrained(spec.tokenizer or spec.model)
    step_end = StepEnd(config.step_separators, tokenizer.decode, spec.eos_ids, config.max_step_tokens)
    if config.by in SERVED:
        return SERVED[config.by](config.threshold), step_end
    if config.by == "rsd":
        if scorer is None:
            raise RolloutError("rollout.routed.by=rsd needs process rewards of steps, and none were handed in")
        return by_reward(scorer, config.threshold), step_end
    pair = {"draft": fingerprint(draft), "policy": fingerprint(policy)}
    return load_learned(config.path, **pair, separators=config.step_separators, threshold=config.threshold), step_end


def build_judge(config: JudgedConfig, policy: Module) -> Judge:
    """The judge of `rollout.judged`. Raises RolloutError for a head that reads another policy."""
    if config.by == "kl":
        return KLJudge(config.threshold)
    return JudgeHead.load(config.path, policy=fingerprint(policy))
