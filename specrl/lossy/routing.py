"""Monte-Carlo values of reasoning steps under the policy, and the fit of a router to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isfinite, nan
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.lossy.fit import Record, logistic, roc_auc, usual_gaps
from specrl.lossy.pair import Pair
from specrl.reward.base import Sample
from specrl.reward.set import RewardSet
from specrl.rollout.keys import derive_key
from specrl.rollout.lossy.arbitrage import GRID, features, probability
from specrl.rollout.lossy.router import Candidate, Scorer, Step, by_advantage
from specrl.rollout.types import Request
from specrl.run.accuracy import requests
from specrl.run.data import Example
from specrl.run.prompts import seen

WALKS = {"oracle": 0.0, "draft": 1.0}  # advantage above which the walk continues with the policy's step


@dataclass(frozen=True)
class Prefix:
    """A response up to the end of one of its steps."""

    sample: Sample
    """With the text so far."""
    tokens: tuple[int, ...]
    """The prompt and the response so far."""
    finished: bool
    """Whether the response has ended."""


def prefix(candidate: Candidate, step: Step, prompt: Sample, tokenizer: PreTrainedTokenizerBase) -> Prefix:
    """The response continued with `step`. Args: prompt: a sample without a response."""
    response = [*candidate.response, *step.tokens]
    (text,) = tokenizer.batch_decode([response], skip_special_tokens=True)
    return Prefix(replace(prompt, completion=text), (*candidate.prompt, *response), step.end == "eos")


class StepValues:
    """Values of prefixes under the policy: the mean reward of several continuations, NaN where none has a score.

    With n continuations of a 0/1 reward a value v has the standard error sqrt(v (1 - v) / n) (Math-Shepherd, arXiv
    2312.08935). A prefix is valued once.

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
        endings = self._endings([*new.values()])
        samples = [
            replace(p.sample, completion=p.sample.completion + ending)
            for p, group in zip(new.values(), endings, strict=True)
            for ending in group
        ]
        scores = iter(self._score(samples) if samples else [])
        for tokens, group in zip(new, endings, strict=True):
            valid = [score for score in islice(scores, len(group)) if score is not None]
            self.known[tokens] = fmean(valid) if valid else nan
        return [self.known[p.tokens] for p in prefixes]

    def _endings(self, prefixes: Sequence[Prefix]) -> list[list[str]]:
        """The texts that follow each prefix; nothing follows one that has ended."""
        cap = self._pair.config.rollout.max_new_tokens
        requests = [Request(p.tokens, key, cap) for p in prefixes if not p.finished for key in self._keys]
        done = self._engine.generate(requests)[0] if requests else []
        self.decoded += sum(len(c.tokens) for c in done)
        texts = iter(self._pair.tokenizer.batch_decode([c.tokens for c in done], skip_special_tokens=True))
        return [[""] if p.finished else [*islice(texts, len(self._keys))] for p in prefixes]


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
        for c, gain in zip(candidates, advantages, strict=True):
            if isfinite(gain):
                text = (*c.prompt, *c.response, *c.step.tokens)
                logprobs = tuple(c.step.logprobs), tuple(c.step.policy_logprobs)
                records[text] = Record(c.row, features(c), gain, *logprobs)
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


def train(records: Sequence[Record], config: Config) -> dict[str, Any]:
    """The router's weights and usual gaps, and the report on the steps of the held-out problems, as its card has them.

    Raises:
        ConfigError: too few steps of one class.
    """
    learning, held_out = ([r for r in records if (r.problem % 5 == 0) == part] for part in (False, True))
    has_gain = [r.advantage > 0 for r in learning]
    if len(set(has_gain)) < 2 or not held_out:
        raise ConfigError(
            f"dataset.train_size={config.dataset.train_size} gave {len(records)} steps, too few of one class to learn "
            "from. Take more prompts, or a pair of models that differ more."
        )
    inputs = torch.tensor([r.features for r in learning], dtype=torch.float64)
    weights, bias = logistic(inputs, torch.tensor(has_gain), ridge=1e-3)
    router = [*weights.tolist(), bias.item()]
    report = {
        "steps": len(records),
        "with_gain": sum(r.advantage > 0 for r in records),
        "roc_auc": roc_auc([probability(router, r.features) for r in held_out], [r.advantage > 0 for r in held_out]),
    }
    gaps = usual_gaps([probability(router, r.features) for r in records], records, GRID)
    return {"weights": router, "usual_gaps": gaps, "report": report}
