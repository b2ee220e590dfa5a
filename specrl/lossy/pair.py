"""A policy and its draft model in a run, and the engines they make."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specrl.config.schema import Config
from specrl.rollout.drafter import load_drafter
from specrl.rollout.engines.base import Limits, SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.lossy.judge import Judge
from specrl.rollout.lossy.judged import Judged
from specrl.rollout.lossy.routed import RoutedEngine, Steps
from specrl.rollout.lossy.router import Router
from specrl.rollout.lossy.steps import StepEnd
from specrl.run.policy import engine_spec, load_policy


@dataclass(frozen=True)
class Pair:
    """A policy, the cheaper model that drafts for it, if any, and how both sample."""

    policy: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingParams
    config: Config

    def plain(self, model: PreTrainedModel) -> TransformersEngine:
        """One of the two by itself."""
        return TransformersEngine(model, self.sampling, limits=Limits.of(self.config.rollout))

    def routed(self, router: Router) -> RoutedEngine:
        """An engine for text alone: kept draft steps get no log-probs of the policy."""
        rule = self.config.rollout.routed
        end = StepEnd(rule.step_separators, self.tokenizer.decode, self.sampling.eos_ids, rule.max_step_tokens)
        steps = Steps(self.draft, router, end, score=False)
        return RoutedEngine(self.policy, self.sampling, steps, Limits.of(self.config.rollout))

    def judged(self, judge: Judge) -> TransformersEngine:
        """Verifies under a judge what the draft model writes or, without one, the requests' own drafts."""
        limits = Limits.of(self.config.rollout)
        judged = Judged(judge, self.sampling, self.draft, limits=limits)
        return TransformersEngine(self.policy, self.sampling, judged.rule, judged, limits)


def load_pair(config: Config) -> Pair:
    """The run's policy and its `rollout.drafter`, None where that is empty."""
    policy, tokenizer, eos_ids = load_policy(config)
    draft = load_drafter(engine_spec(config, eos_ids), policy.eval()) if config.rollout.drafter else None
    sampling = SamplingParams(eos_ids, config.rollout.temperature, config.rollout.top_k, config.rollout.top_p)
    return Pair(policy.eval(), draft, tokenizer, sampling, config)
