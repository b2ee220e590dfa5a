"""A policy and its draft model in a run, and the engines they make."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specrl.config.schema import Config
from specrl.rollout.drafting.drafting import check_vocab
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.local.head import load_drafter
from specrl.rollout.lossy.arbitrage import build_step_end
from specrl.rollout.lossy.judge import Judge
from specrl.rollout.lossy.judged import Judged
from specrl.rollout.lossy.pair import fingerprint
from specrl.rollout.lossy.routed import RoutedRollout
from specrl.rollout.lossy.router import Router
from specrl.rollout.lossy.text import ReadOrVerify
from specrl.rollout.types import RolloutError
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
        """An engine for one of the two models."""
        return TransformersEngine(model, self.sampling, limits=self.config.rollout)

    def routed(self, router: Router) -> RoutedRollout:
        """Steps of the draft model, or of the policy where the router says so."""
        if self.draft is None:
            raise RolloutError("routing needs a draft model: set rollout.drafter")
        texts, draft = ReadOrVerify(), self.plain(self.draft)
        rollout = self.config.rollout
        policy = TransformersEngine(self.policy, self.sampling, texts.rule, texts, rollout)
        end = build_step_end(rollout.routed, self.tokenizer, self.sampling.eos_ids)
        check_vocab(draft.vocab, policy.vocab)
        return RoutedRollout(policy, draft, router, end)

    def judged(self, judge: Judge) -> TransformersEngine:
        """Verifies the draft model's tokens or, without one, the requests' drafts under a judge."""
        limits = self.config.rollout
        judged = Judged(judge, self.sampling, self.draft, limits=limits)
        return TransformersEngine(self.policy, self.sampling, judged.rule, judged, limits)

    def fingerprints(self) -> dict[str, str]:
        """Of the policy's weights and, if there is one, the draft model's."""
        models = {"draft": self.draft, "policy": self.policy}
        return {name: fingerprint(model) for name, model in models.items() if model is not None}


def load_pair(config: Config) -> Pair:
    """The run's policy and its `rollout.drafter`, None if that is empty, in this process."""
    config.cluster.num_workers = 0
    policy, tokenizer, eos_ids = load_policy(config)
    draft = load_drafter(engine_spec(config, eos_ids), policy.eval()) if config.rollout.drafter else None
    rollout = config.rollout
    sampling = SamplingParams(eos_ids, rollout.temperature, rollout.top_k, rollout.top_p)
    return Pair(policy.eval(), draft, tokenizer, sampling, config)
