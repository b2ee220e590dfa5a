"""Arbitrage's router, which decides from the draft alone, and the router that a run's options name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.lossy.pair import fingerprint, read_card
from specrl.rollout.lossy.router import Candidate, Router, Step, StepEnd, by_likelihood
from specrl.rollout.sections import RoutedConfig
from specrl.rollout.types import RolloutError

MAX_SURPRISE = 50.0  # nats; a token that the model excludes would be infinitely unlikely
FEATURES = ("step max", "step mean", "history max", "history mean", "step tokens", "history tokens")
"""Of a learned router: surprise of the step's tokens and of those before it, and their numbers."""
GRID = 21
"""Thresholds 0, 0.05 ... 1 at which a learned router's card has its usual gap."""


def learned(weights: Sequence[float], threshold: float = 0.5, usual_gap: float | None = None) -> Router:
    """After Arbitrage (arXiv 2512.05033): escalates where the policy's step is probably worth more than the draft's.

    It decides before any pass of the policy. Arbitrage classifies the text; this classifier uses how surprising the
    draft model found its own tokens, of the step and of the steps before, with the lengths of both.

    Args:
        weights: of `features`, in their order, and last the bias.
        threshold: probability, 0 to 1; higher keeps more draft steps.
        usual_gap: see Router.
    """
    return Router(
        lambda steps: [probability(weights, features(c)) for c in steps], threshold, high=1.0, usual_gap=usual_gap
    )


def load_learned(
    folder: str | Path, *, draft: str, policy: str, separators: Sequence[str], threshold: float = 0.5
) -> Router:
    """The router that `specrl.train_router` wrote to `folder`.

    Args: draft, policy: fingerprints of the models in use; separators: of their steps.

    Raises:
        RolloutError: it belongs to another pair or other steps, or is not a router.
    """
    card = read_card(folder, "arbitrage", draft=draft, policy=policy, separators=list(separators))
    weights = _numbers(folder, card, "weights", len(FEATURES) + 1)
    gaps = _numbers(folder, card, "usual_gaps", GRID)
    return learned(weights, threshold, gaps[round(threshold * (GRID - 1))])


def _numbers(folder: str | Path, card: Mapping[str, Any], name: str, count: int) -> list[float]:
    values = card.get(name)
    if isinstance(values, list) and len(values) == count and all(isinstance(value, float) for value in values):
        return values
    raise RolloutError(f"the router in {folder} has {name}={values!r:.60}, not {count} numbers; train it again")


def features(candidate: Candidate) -> tuple[float, ...]:
    """FEATURES of a draft step, each as log(1 + x), from what the draft model and the response so far tell.

    The surprise of a token is -log p under the model that wrote it, at most MAX_SURPRISE.
    """
    step, history = _surprises([candidate.step]), _surprises(candidate.history)
    values = max(step, default=0.0), _mean(step), max(history, default=0.0), _mean(history), len(step), len(history)
    return tuple(math.log1p(value) for value in values)


def probability(weights: Sequence[float], values: Sequence[float]) -> float:
    """Logistic regression on `values`; the last weight is the bias."""
    logit = weights[-1] + sum(w * x for w, x in zip(weights[:-1], values, strict=True))
    return (1 + math.tanh(logit / 2)) / 2  # the logistic function, in a form that never overflows


def _surprises(steps: Sequence[Step]) -> list[float]:
    return [min(MAX_SURPRISE, -logprob) for step in steps for logprob in step.logprobs]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def build_step_end(config: RoutedConfig, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int]) -> StepEnd:
    """The end of steps of `rollout.routed`."""
    return StepEnd(config.step_separators, tokenizer.decode, eos_ids, config.max_step_tokens, len(tokenizer))


def build_router(spec: EngineSpec) -> tuple[Router, StepEnd]:
    """The router of `rollout.routed`, and the end of its steps.

    Raises:
        RolloutError: a learned router of another pair.
    """
    config = spec.rollout.routed
    step_end = build_step_end(config, AutoTokenizer.from_pretrained(spec.tokenizer or spec.model), spec.eos_ids)
    if config.by == "likelihood":
        return by_likelihood(config.threshold), step_end
    on_cpu = replace(spec, device="cpu")
    router = load_learned(
        spec.rollout.trained,
        draft=fingerprint(on_cpu.load(spec.rollout.drafter)),
        policy=fingerprint(on_cpu.load(spec.model)),
        separators=config.step_separators,
        threshold=config.threshold,
    )
    return router, step_end
