"""What a reasoning step is worth: process rewards of a run, Monte-Carlo values under its policy, and a router's fit."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.lossy.pair import Pair
from specrl.reward.base import Sample
from specrl.reward.prm import Prefix, TransformersPRM, monte_carlo
from specrl.reward.set import RewardSet
from specrl.rollout.keys import derive_key
from specrl.rollout.lossy.router import Scorer, by_advantage, features, probability
from specrl.rollout.lossy.steps import Candidate, Step
from specrl.rollout.types import Request
from specrl.run.accuracy import requests
from specrl.run.data import Example
from specrl.run.policy import device, load_tokenizer
from specrl.run.prompts import seen
from specrl.trainers.lossy.fit import logistic, spearman
from specrl.trainers.lossy.router import Record, accuracy_by_class, curve

WALKS = {"oracle": 0.0, "draft": 1.0}  # advantage above which the walk goes on with the policy's step


def prefix(candidate: Candidate, step: Step, begun: Sample, tokenizer: PreTrainedTokenizerBase) -> Prefix:
    """What a process reward sees when the response goes on with `step`. Args: begun: the prompt, with no response."""
    response = (*candidate.response, *step.tokens)
    text, tokens = tokenizer.decode(response, skip_special_tokens=True), (*candidate.prompt, *response)
    finished = step.end == "eos"
    return Prefix(begun.prompt, text, begun.answer, begun.fields, begun.messages, finished, tokens)


def step_scorer(config: Config) -> Scorer | None:
    """Process rewards of draft steps for `rollout.routed.by=rsd`, NaN where there is none; None for other routers."""
    if (config.rollout.acceptance, config.rollout.routed.by) != ("routed", "rsd"):
        return None
    tokenizer, prm = load_tokenizer(config), TransformersPRM(config.rollout.routed.path, str(device(config)))

    def scores(candidates: Sequence[Candidate]) -> list[float]:
        prompts = tokenizer.batch_decode([c.prompt for c in candidates], skip_special_tokens=True)
        given = zip(candidates, prompts, strict=True)
        found = prm([prefix(c, c.step, Sample(prompt, ""), tokenizer) for c, prompt in given])
        return [nan if value is None else value for value in found]

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
        self._pair, self._engine = pair, pair.plain(pair.policy)
        self._keys = [derive_key(seed, "value", i, 0) for i in range(continuations)]
        self._score = lambda samples: rewards.score(samples).total
        self.known: dict[tuple[int, ...], float] = {}
        """Values by tokens of the prefix."""
        self.asked: dict[tuple[int, ...], Prefix] = {}
        """The prefixes, likewise."""
        self.decoded = 0
        """Tokens spent on continuations."""

    def __call__(self, prefixes: Sequence[Prefix]) -> list[float]:
        new = {p.tokens: p for p in prefixes if p.tokens not in self.known}
        self.asked |= new
        found = monte_carlo(list(new.values()), self._continue, self._score) if new else []
        self.known |= {tokens: nan if value is None else value for tokens, value in zip(new, found, strict=True)}
        return [self.known[p.tokens] for p in prefixes]

    def _continue(self, prefixes: Sequence[Prefix]) -> list[list[str]]:
        cap, count = self._pair.config.rollout.max_new_tokens, len(self._keys)
        done, _ = self._engine.generate([Request(p.tokens, key, cap) for p in prefixes for key in self._keys])
        self.decoded += sum(len(c.tokens) for c in done)
        texts = self._pair.tokenizer.batch_decode([c.tokens for c in done], skip_special_tokens=True)
        return [texts[i : i + count] for i in range(0, len(texts), count)]


def gains(values: StepValues, asked: Sequence[Prefix]) -> list[float]:
    """Values of the policy's steps less those of the draft's, which come before them in `asked`."""
    found = values(asked)
    return [s_t - s_d for s_d, s_t in zip(found[::2], found[1::2], strict=True)]


def advantage(pair: Pair, values: StepValues, examples: Sequence[Example]) -> Scorer:
    """The oracle's scorer. Args: examples: of the requests, in their order."""

    begun = seen(examples, [""] * len(examples), pair.tokenizer, pair.config.dataset)

    def scores(candidates: Sequence[Candidate]) -> list[float]:
        steps = [(c, step) for c in candidates for step in (c.step, c.rival)]
        return gains(values, [prefix(c, step, begun[c.row], pair.tokenizer) for c, step in steps])

    return scores


def collect(pair: Pair, values: StepValues, examples: Sequence[Example]) -> list[Record]:
    """Every step of two walks per example, with the values of both models' steps.

    The oracle's walk is Arbitrage's. It hardly ever sees a response that has gone wrong, which a router at work does
    see, so the draft's own walk is recorded too (after DAgger, arXiv 1011.0686).
    """
    records: dict[tuple[int, ...], Record] = {}  # by the text: two walks may begin alike
    scores = advantage(pair, values, examples)

    def noted(candidates: Sequence[Candidate]) -> list[float]:
        found = scores(candidates)
        for c in candidates:
            before, steps = (*c.prompt, *c.response), (tuple(c.step.tokens), tuple(c.rival.tokens))
            worth = [values.known[before + step] for step in steps]
            if all(map(isfinite, worth)):  # a step without a value teaches nothing
                records[before + steps[0]] = Record(examples[c.row].id, features(c), before, *steps, *worth)
        return found

    oracle = by_advantage(noted)
    for walk, oracle.threshold in WALKS.items():
        _, stats = pair.routed(oracle).generate(requests(examples, pair.tokenizer, pair.config, walk))
        print(
            f"{walk} walk: {len(examples)} responses, {stats.steps} steps, {stats.route_faults} faults, "
            f"{values.decoded} tokens of continuations so far",
            flush=True,
        )
    return list(records.values())


def revalued(records: Sequence[Record], values: StepValues, others: StepValues) -> list[float]:
    """The advantages of visited steps, valued once more: their agreement bounds what a router can be seen to know.

    Args: values: knows the steps already; others: continuations with other noise.
    """
    return gains(others, [values.asked[*r.before, *step] for r in records for step in (r.draft_step, r.policy_step)])


def train(
    learning: Sequence[Record], held: Sequence[Record], again: Sequence[float], config: Config
) -> tuple[list[float], dict[str, Any]]:
    """The router's weights, and the report on the steps in `held`.

    Args: again: their advantages, valued once more.

    Raises:
        ConfigError: too few steps of one kind.
    """
    gained = [r.advantage > 0 for r in learning]
    if len(set(gained)) < 2 or not held:
        raise ConfigError(
            f"dataset.train_size={config.dataset.train_size} gave {len(learning) + len(held)} steps, too few of one "
            "kind to learn from. Take more prompts, or a pair of models that differ more."
        )
    inputs = torch.tensor([r.features for r in learning], dtype=torch.float64)
    found, bias = logistic(inputs, torch.tensor(gained), ridge=1e-3)
    weights = [*found.tolist(), bias.item()]
    truth = [r.advantage for r in held]
    valued_twice = [(a, b) for a, b in zip(again, truth, strict=True) if isfinite(a)]
    scores, doubts = [probability(weights, r.features) for r in held], [r.features[0] for r in held]
    without_ties = torch.tensor(truth, dtype=torch.float64).argsort(stable=True).argsort().tolist()
    return weights, {
        "steps": len(learning) + len(held),
        "with_gain": sum(r.advantage > 0 for r in (*learning, *held)),
        "spearman": spearman(scores, truth),
        "spearman_of_likelihood": spearman(doubts, truth),
        "spearman_of_valuing_again": spearman(*zip(*valued_twice, strict=True)) if valued_twice else 0.0,
        "spearman_of_a_strict_order": spearman(without_ties, truth),  # most that a score can know of values that tie
        "escalated_of_gain_kept_of_rest": accuracy_by_class(scores, truth, 0.5),
        "curves": {
            "arbitrage": curve(scores, held),
            "likelihood": curve(doubts, held),
            "rsd on true values": curve([-r.draft_value for r in held], held),
            "oracle": curve(truth, held),
        },
    }
