"""Values of reasoning steps: process rewards of a run, Monte-Carlo values under its policy, and a router's fit."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.lossy.fit import Record, accuracy_by_class, logistic, usual_gaps
from specrl.lossy.pair import Pair
from specrl.reward.base import Sample
from specrl.reward.prm import Prefix, TransformersPRM, monte_carlo
from specrl.reward.set import RewardSet
from specrl.rollout.build import build_engine
from specrl.rollout.engines.base import Engine, EngineSpec
from specrl.rollout.keys import derive_key
from specrl.rollout.lossy.arbitrage import GRID, features, probability
from specrl.rollout.lossy.router import Candidate, Scorer, Step, by_advantage
from specrl.rollout.types import Request
from specrl.run.accuracy import requests
from specrl.run.data import Example
from specrl.run.policy import load_tokenizer
from specrl.run.prompts import seen

WALKS = {"oracle": 0.0, "draft": 1.0}  # advantage above which the walk continues with the policy's step


def prefix(candidate: Candidate, step: Step, prompt: Sample, tokenizer: PreTrainedTokenizerBase) -> Prefix:
    """The response continued with `step`, for process rewards. Args: prompt: a sample without a response."""
    response = [*candidate.response, *step.tokens]
    (text,) = tokenizer.batch_decode([response], skip_special_tokens=True)
    return Prefix(
        prompt=prompt.prompt,
        completion=text,
        answer=prompt.answer,
        fields=prompt.fields,
        messages=prompt.messages,
        finished=step.end == "eos",
        tokens=(*candidate.prompt, *response),
    )


def build_scored(config: Config, spec: EngineSpec, model: PreTrainedModel | None = None) -> Engine:
    """The engine of a run whose options may name a process reward model, here or in a worker. Args: see
    `build_engine`."""
    return build_engine(spec, model, step_scorer(config, spec.device))


def step_scorer(config: Config, device: str) -> Scorer | None:
    """Process rewards of draft steps for `rollout.routed.by=rsd`, NaN for none; None for other routers."""
    if (config.rollout.acceptance, config.rollout.routed.by) != ("routed", "rsd"):
        return None
    tokenizer = load_tokenizer(config)
    prm = TransformersPRM(config.rollout.routed.path, device)

    def scores(candidates: Sequence[Candidate]) -> Sequence[float]:
        prompts = tokenizer.batch_decode([[*c.prompt] for c in candidates], skip_special_tokens=True)
        pairs = zip(candidates, prompts, strict=True)
        rewards = prm([prefix(c, c.step, Sample(prompt, ""), tokenizer) for c, prompt in pairs])
        return [nan if reward is None else reward for reward in rewards]

    return scores


class StepValues:
    """Monte-Carlo values of prefixes under the policy; a prefix is valued once, NaN without a score.

    Args:
        pair: its policy finishes the responses, with the run's sampling params.
        rewards: scores them, 0 to 1.
        continuations: responses per prefix.
        seed: of their noise, which is the same for every prefix, so that two steps are compared under common noise.
    """

    def __init__(self, pair: Pair, rewards: RewardSet, continuations: int, seed: int):
        self._pair = pair
        self._engine = pair.plain(pair.policy)
        self._keys = [derive_key(seed, "value", i, 0) for i in range(continuations)]
        self._score = lambda samples: rewards.score(samples).total
        self.known: dict[tuple[int, ...], float] = {}
        """Values by tokens of the prefix."""
        self.decoded = 0
        """Tokens spent on continuations."""

    def __call__(self, prefixes: Sequence[Prefix]) -> list[float]:
        new = {p.tokens: p for p in prefixes if p.tokens not in self.known}
        values = monte_carlo(list(new.values()), self._continue, self._score) if new else []
        self.known |= {tokens: nan if value is None else value for tokens, value in zip(new, values, strict=True)}
        return [self.known[p.tokens] for p in prefixes]

    def _continue(self, prefixes: Sequence[Prefix]) -> list[list[str]]:
        cap = self._pair.config.rollout.max_new_tokens
        count = len(self._keys)
        done, _ = self._engine.generate([Request(p.tokens, key, cap) for p in prefixes for key in self._keys])
        self.decoded += sum(len(c.tokens) for c in done)
        texts = self._pair.tokenizer.batch_decode([c.tokens for c in done], skip_special_tokens=True)
        return [texts[i : i + count] for i in range(0, len(texts), count)]


def advantage(pair: Pair, values: StepValues, examples: Sequence[Example]) -> Scorer:
    """The oracle's scorer. Args: examples: of the requests, in their order."""
    prompts = seen(examples, [""] * len(examples), pair.tokenizer, pair.config.dataset)

    def scores(candidates: Sequence[Candidate]) -> Sequence[float]:
        steps = [(c, step) for c in candidates for step in _both_steps(c)]
        both = values([prefix(c, step, prompts[c.row], pair.tokenizer) for c, step in steps])
        return [s_t - s_d for s_d, s_t in zip(both[::2], both[1::2], strict=True)]

    return scores


def _both_steps(candidate: Candidate) -> tuple[Step, Step]:
    """The draft's step and the policy's."""
    if candidate.rival is None:
        raise ValueError(f"the candidate of row {candidate.row} has no step of the policy")
    return candidate.step, candidate.rival


def collect(pair: Pair, values: StepValues, examples: Sequence[Example]) -> list[Record]:
    """Every step of two walks per example, with the values of both models' steps.

    The oracle's walk is Arbitrage's. It hardly ever meets a response that has gone wrong, which a router in use does
    meet, so the draft's walk is recorded too (after DAgger, arXiv 1011.0686).
    """
    records: dict[tuple[int, ...], Record] = {}  # by the text, as two walks may begin alike
    scores = advantage(pair, values, examples)

    def recorded(candidates: Sequence[Candidate]) -> Sequence[float]:
        advantages = scores(candidates)
        for c in candidates:
            before = (*c.prompt, *c.response)
            draft_step, policy_step = (tuple(step.tokens) for step in _both_steps(c))
            draft_value = values.known[before + draft_step]
            policy_value = values.known[before + policy_step]
            if isfinite(draft_value) and isfinite(policy_value):
                records[before + draft_step] = Record(
                    problem=examples[c.row].id,
                    features=features(c),
                    before=before,
                    draft_step=draft_step,
                    policy_step=policy_step,
                    draft_value=draft_value,
                    policy_value=policy_value,
                    draft_logprobs=tuple(c.step.logprobs),
                    policy_logprobs=tuple(c.step.policy_logprobs),
                )
        return advantages

    oracle = by_advantage(recorded)
    for walk, oracle.threshold in WALKS.items():
        _, stats = pair.routed(oracle).generate(requests(examples, pair.tokenizer, pair.config, walk))
        print(
            f"{walk} walk: {len(examples)} responses, {stats.steps} steps, {stats.route_faults} faults, "
            f"{values.decoded} tokens of continuations so far",
            flush=True,
        )
    return list(records.values())


def train(learning: Sequence[Record], held_out: Sequence[Record], config: Config) -> dict[str, Any]:
    """The router's weights and usual gaps, and the report on the steps in `held_out`, as its card has them.

    Raises:
        ConfigError: too few steps of one class.
    """
    has_gain = [r.advantage > 0 for r in learning]
    if len(set(has_gain)) < 2 or not held_out:
        raise ConfigError(
            f"dataset.train_size={config.dataset.train_size} gave {len(learning) + len(held_out)} steps, too few of "
            "one class to learn from. Take more prompts, or a pair of models that differ more."
        )
    inputs = torch.tensor([r.features for r in learning], dtype=torch.float64)
    weights, bias = logistic(inputs, torch.tensor(has_gain), ridge=1e-3)
    router = [*weights.tolist(), bias.item()]
    advantages = [r.advantage for r in held_out]
    scores = [probability(router, r.features) for r in held_out]
    everything = [*learning, *held_out]
    gaps = usual_gaps([probability(router, r.features) for r in everything], everything, GRID)
    report = {
        "steps": len(everything),
        "with_gain": sum(r.advantage > 0 for r in everything),
        "escalated_of_gain_kept_of_rest": accuracy_by_class(scores, advantages, 0.5),
    }
    return {"weights": router, "usual_gaps": gaps, "report": report}
