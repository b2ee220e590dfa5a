"""Routing in a run: the two models, where their steps end, and what a step is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrl.options import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from reward.base import RewardSet
    from reward.process import Prefix
    from rollout.engines.ragged import RaggedModel
    from rollout.engines.routed import RoutedEngine
    from rollout.engines.transformers import TransformersEngine
    from rollout.routers.base import Router, Scorer
    from rollout.steps import Candidate, Step
    from specrl.data import Example
    from specrl.schema import Config


@dataclass(frozen=True)
class Pair:
    """A policy and the cheaper model that drafts its steps."""

    policy: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    config: Config

    def routed(self, router: Router) -> RoutedEngine:
        """An engine for text alone: kept draft steps get no log-probs of the policy."""
        from rollout.engines.routed import RoutedEngine
        from rollout.steps import StepEnd

        rule = self.config.rollout.routed
        end = StepEnd(rule.step_separators, self.tokenizer.decode, self.eos_ids, rule.max_step_tokens)
        options = {"draft": self.draft, "router": router, "step_end": end, "score": False}
        return RoutedEngine(self.policy, self._sampling, **options, **self._bounds)

    def plain(self, model: PreTrainedModel) -> TransformersEngine:
        """One of the two by itself."""
        from rollout.engines.transformers import TransformersEngine

        return TransformersEngine(model, self._sampling, **self._bounds)

    def ragged(self, model: PreTrainedModel) -> RaggedModel:
        """One of the two for single passes."""
        from rollout.engines.ragged import RaggedModel

        return RaggedModel(model, self._sampling, tokens_per_pass=self.config.rollout.tokens_per_pass)

    @property
    def _sampling(self):
        from rollout.engines.base import Sampling

        rollout = self.config.rollout
        return Sampling(self.eos_ids, rollout.temperature, rollout.top_k, rollout.top_p)

    @property
    def _bounds(self) -> dict:
        rollout = self.config.rollout
        return {"rows_per_batch": rollout.rows_per_batch, "tokens_per_pass": rollout.tokens_per_pass}


def load_pair(config: Config) -> Pair:
    """The run's policy and its `rollout.drafter`.

    Raises:
        ConfigError: no draft model.
    """
    from rollout.engines import load_drafter
    from specrl.policy import engine_spec, load_policy

    if not config.rollout.drafter:
        raise ConfigError(
            "rollout.drafter is empty: routing needs a model that writes steps. Give a model directory, such as "
            "`python -m specrl.drafter out=DIR` writes"
        )
    policy, tokenizer, eos_ids = load_policy(config)
    policy.eval()
    return Pair(policy, load_drafter(engine_spec(config, eos_ids), policy), tokenizer, eos_ids, config)


def prefix(candidate: Candidate, step: Step, example: Example, tokenizer: PreTrainedTokenizerBase) -> Prefix:
    """What a process reward sees when the response goes on with `step`."""
    from reward.process import Prefix

    steps = [*candidate.history, step]
    texts = tokenizer.batch_decode([s.tokens for s in steps], skip_special_tokens=True)
    tokens = (*candidate.prompt, *(token for s in steps for token in s.tokens))
    finished = step.end == "eos"
    return Prefix(str(example.prompt), tuple(texts), example.answer, example.fields, finished, tokens)


def step_scorer(config: Config) -> Scorer | None:
    """Process rewards of draft steps where `rollout.routed.by=rsd` asks them, else None."""
    if (config.rollout.law, config.rollout.routed.by) != ("routed", "rsd"):
        return None
    from transformers import AutoTokenizer

    from specrl.policy import device, engine_spec

    spec = engine_spec(config, frozenset())
    tokenizer = AutoTokenizer.from_pretrained(spec.tokenizer or spec.model)
    return prm_scorer(config.rollout.routed.path, str(device(config)), tokenizer)


def prm_scorer(source: str, device: str, tokenizer: PreTrainedTokenizerBase) -> Scorer:
    """Process rewards of draft steps by a model; NaN where it gives none."""
    from reward.process import Prefix, TransformersPRM

    prm = TransformersPRM(source, device)

    def scores(candidates: Sequence[Candidate]) -> list[float]:
        prompts = tokenizer.batch_decode([c.prompt for c in candidates], skip_special_tokens=True)
        steps = [
            tokenizer.batch_decode([s.tokens for s in (*c.history, c.step)], skip_special_tokens=True)
            for c in candidates
        ]
        found = prm([Prefix(prompt, tuple(texts)) for prompt, texts in zip(prompts, steps, strict=True)])
        return [float("nan") if value is None else value for value in found]

    return scores


class StepValues:
    """Monte-Carlo values of prefixes under the policy; a prefix is valued once, NaN where the reward gave nothing.

    Args:
        pair: the policy finishes the responses, at the run's sampling law.
        rewards: scores them, 0 to 1.
        continuations: responses per prefix.
        seed: of their noise, which is the same for every prefix, so that two steps are compared under equal luck.
    """

    def __init__(self, pair: Pair, rewards: RewardSet, continuations: int, seed: int):
        from reward.process import MonteCarloValue

        self._pair, self._count, self._seed = pair, continuations, seed
        self._engine = pair.plain(pair.policy)
        self._value = MonteCarloValue(self._continue, lambda samples: rewards.score(samples).total)
        self._known: dict[tuple[int, ...], float] = {}
        self.decoded = 0
        """Tokens spent on continuations."""

    def __call__(self, prefixes: Sequence[Prefix]) -> list[float]:
        new = {p.tokens: p for p in prefixes if p.tokens not in self._known}
        for tokens, value in zip(new, self._value(list(new.values())) if new else [], strict=True):
            self._known[tokens] = float("nan") if value is None else value
        return [self._known[p.tokens] for p in prefixes]

    def _continue(self, prefixes: Sequence[Prefix]) -> list[list[str]]:
        from rollout.noise import derive_key
        from rollout.types import Request

        keys = [derive_key(self._seed, "value", i, 0) for i in range(self._count)]
        cap = self._pair.config.rollout.max_new_tokens
        done, _ = self._engine.generate([Request(p.tokens, key, cap) for p in prefixes for key in keys])
        self.decoded += sum(len(c.tokens) for c in done)
        texts = self._pair.tokenizer.batch_decode([c.tokens for c in done], skip_special_tokens=True)
        return [texts[i : i + self._count] for i in range(0, len(texts), self._count)]


def advantage(
    pair: Pair,
    values: StepValues,
    examples: Sequence[Example],
    seen: Callable[[Candidate, Example, float, float], None] = lambda *_: None,
) -> Scorer:
    """The oracle's scorer: value of the policy's step less that of the draft's.

    Args: examples: of the requests, in their order; seen: told candidate, example, s_d and s_t of every step.
    """

    def scores(candidates: Sequence[Candidate]) -> list[float]:
        owners = [examples[c.row] for c in candidates]
        steps = [(c, step, e) for c, e in zip(candidates, owners, strict=True) for step in (c.step, c.rival)]
        found = values([prefix(c, step, e, pair.tokenizer) for c, step, e in steps])
        pairs = list(zip(found[::2], found[1::2], strict=True))
        for candidate, example, (s_d, s_t) in zip(candidates, owners, pairs, strict=True):
            seen(candidate, example, s_d, s_t)
        return [s_t - s_d for s_d, s_t in pairs]

    return scores
