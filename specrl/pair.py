"""A policy and its draft model in a run, and the engines they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.engines import load_drafter
from rollout.engines.base import Sampling
from rollout.engines.judged import JudgedEngine
from rollout.engines.routed import RoutedEngine
from rollout.engines.transformers import TransformersEngine
from rollout.steps import StepEnd
from specrl.policy import engine_spec, load_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rollout.routers.base import Router
    from rollout.routers.judge import Judge
    from specrl.schema import Config


@dataclass(frozen=True)
class Pair:
    """A policy, the cheaper model that drafts for it, if any, and how both sample."""

    policy: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    config: Config

    def plain(self, model: PreTrainedModel) -> TransformersEngine:
        """One of the two by itself."""
        return TransformersEngine(model, self.sampling, **self._bounds)

    def routed(self, router: Router) -> RoutedEngine:
        """An engine for text alone: kept draft steps get no log-probs of the policy."""
        rule = self.config.rollout.routed
        end = StepEnd(rule.step_separators, self.tokenizer.decode, self.sampling.eos_ids, rule.max_step_tokens)
        options = {"draft": self.draft, "router": router, "step_end": end, "score": False}
        return RoutedEngine(self.policy, self.sampling, **options, **self._bounds)

    def judged(self, judge: Judge) -> JudgedEngine:
        """Verifies under a judge what the draft model writes or, without one, the requests' own drafts."""
        return JudgedEngine(self.policy, self.sampling, judge=judge, draft=self.draft, **self._bounds)

    @property
    def _bounds(self) -> dict[str, int]:
        rollout = self.config.rollout
        return {"rows_per_batch": rollout.rows_per_batch, "tokens_per_pass": rollout.tokens_per_pass}


def load_pair(config: Config) -> Pair:
    """The run's policy and its `rollout.drafter`, None where that is empty."""
    policy, tokenizer, eos_ids = load_policy(config)
    draft = load_drafter(engine_spec(config, eos_ids), policy.eval()) if config.rollout.drafter else None
    sampling = Sampling(eos_ids, config.rollout.temperature, config.rollout.top_k, config.rollout.top_p)
    return Pair(policy.eval(), draft, tokenizer, sampling, config)
