"""Step routers: which draft steps the policy writes instead. Each scores a step and has a threshold for the score."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.nn import Module
from transformers import AutoTokenizer

from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.lossy.pair import fingerprint, read_card
from specrl.rollout.lossy.steps import Candidate, Step, StepEnd
from specrl.rollout.sections import RoutedConfig
from specrl.rollout.types import RolloutError

ENTROPY_WINDOW = 4  # tokens of the entropy's rolling mean
MAX_SURPRISE = 50.0  # nats; a token that top-k or top-p excludes would be infinitely unlikely

Scorer = Callable[[Sequence[Candidate]], Sequence[float]]
"""One number per candidate. Process rewards are passed in this way, as the rollout package does not know rewards."""


@dataclass
class Router:
    """Decides for each draft step whether the policy writes the step instead."""

    score: Scorer
    """Higher escalates."""
    threshold: float
    """A candidate with a higher score is escalated to the policy."""
    low: float = 0.0
    high: float = math.inf
    """The range of scores; any other score is a fault."""
    needs: frozenset[str] = frozenset()
    """What candidates must contain: `entropy` (Step.entropies), `likelihood` (Step.policy_logprobs, for which the
    policy reads each draft step in a pass), `rival` (Candidate.rival)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A router's decision about a batch of candidates."""

    escalate: list[bool]
    faults: int = 0
    """Candidates that are escalated because the router failed on them."""
    reason: str = ""
    """The first failure."""


def decide(router: Router, candidates: Sequence[Candidate]) -> Decision:
    """Escalates every candidate whose score is above the threshold, or that the router could not score.

    A router that raises, or returns another number of scores, fails on all of them; a score that is NaN or out of range
    fails on its own candidate. The policy's own step is always right, only slower.
    """
    try:
        scores = [float(score) for score in router.score(candidates)]
        if len(scores) != len(candidates):
            raise ValueError(f"{len(scores)} scores for {len(candidates)} candidates")
    except Exception as error:  # of a learned or user-written router
        reason = f"the router failed: {type(error).__name__}: {error}"
        return Decision([True] * len(candidates), len(candidates), reason)
    bad = [score for score in scores if not router.low <= score <= router.high]  # NaN is in no range
    reason = f"the router gave {bad[0]}, not in {router.low:g}..{router.high:g}" if bad else ""
    threshold = min(router.threshold, router.high)
    return Decision([not router.low <= score <= threshold for score in scores], len(bad), reason)


def by_entropy(threshold: float, window: int = ENTROPY_WINDOW) -> Router:
    """Escalates a step whose largest rolling mean of the draft's entropy is above the threshold, in nats.

    After Entropy Adaptive Decoding (arXiv 2502.06833), which switches models at every token; here per step. The mean of
    a step with fewer than `window` tokens is over all of them.
    """

    def peak(values: Sequence[float]) -> float:
        width = min(window, len(values))
        return max(sum(values[i : i + width]) / width for i in range(len(values) - width + 1))

    return Router(lambda steps: [peak(c.step.entropies) for c in steps], threshold, needs=frozenset({"entropy"}))


def by_likelihood(threshold: float) -> Router:
    """Escalates a step with a token whose log-prob under the policy is below minus the threshold, in nats.

    Needs no training. One token decides, as one wrong number makes a step wrong however likely the rest of it is. The
    policy reads each draft step in a pass, which is a verification: at threshold 0 this is exact speculative decoding
    (except that tokens whose probability rounds to 1 are accepted), and a higher threshold keeps more of the draft.
    """
    needs = frozenset({"likelihood"})
    return Router(lambda steps: [-min(c.step.policy_logprobs) for c in steps], threshold, needs=needs)


def by_reward(scorer: Scorer, min_reward: float = 0.7) -> Router:
    """Reward-guided speculative decoding (RSD, arXiv 2501.19324): escalates a step whose process reward is low.

    It does so also where the policy would do no better.

    Args:
        scorer: process reward of each candidate step, 0 to 1.
        min_reward: RSD's threshold; the published code uses 0.7.
    """
    return Router(lambda steps: [1 - reward for reward in scorer(steps)], 1 - min_reward, high=1.0)


def by_advantage(advantage: Scorer, threshold: float = 0.0) -> Router:
    """The oracle of Arbitrage (arXiv 2512.05033): escalates by the advantage s_t - s_d of the policy's step.

    It compares both models' steps after the same prefix, so it saves nothing: it is the upper bound of every other
    router, and the teacher of the learned one. Optimal for the sum of step scores if decisions do not influence later
    steps.

    Args:
        advantage: s_t - s_d of candidates with their rivals, -1 to 1.
        threshold: 0 escalates exactly where the policy's step is worth more.
    """
    needs = frozenset({"rival", "likelihood"})  # the read saves the policy the tokens that both steps begin with
    return Router(advantage, threshold, low=-1.0, high=1.0, needs=needs)


def learned(weights: Sequence[float], threshold: float = 0.5) -> Router:
    """After Arbitrage (arXiv 2512.05033): escalates where the policy's step is probably worth more than the draft's.

    Arbitrage classifies the text. This classifier uses how unlikely the policy finds the step and the steps before: an
    unlikely step is probably wrong, and after an earlier mistake there is less to gain.

    Args:
        weights: of `features`, in their order, and last the bias.
        threshold: probability, 0 to 1; higher keeps more draft steps.
    """
    needs = frozenset({"likelihood"})
    return Router(lambda steps: [probability(weights, features(c)) for c in steps], threshold, high=1.0, needs=needs)


def load_learned(
    folder: str | Path, *, draft: str, policy: str, separators: Sequence[str], threshold: float = 0.5
) -> Router:
    """The router that `specrl.train_router` wrote to `folder`.

    Args: draft, policy: fingerprints of the models in use; separators: of their steps.

    Raises:
        RolloutError: it belongs to another pair or other steps, or is not a router.
    """
    card = read_card(folder, "arbitrage", draft=draft, policy=policy, separators=list(separators))
    weights = card.get("weights")
    if not (isinstance(weights, list) and len(weights) == 3 and all(isinstance(w, float) for w in weights)):
        raise RolloutError(f"the router in {folder} has weights={weights}, not two and a bias; train it again")
    return learned(weights, threshold)


def features(candidate: Candidate) -> tuple[float, float]:
    """log(1 + s) for s = -log p of the policy's least likely token: of the step, and of all steps before it."""
    return math.log1p(_surprise([candidate.step])), math.log1p(_surprise(candidate.history))


def probability(weights: Sequence[float], values: Sequence[float]) -> float:
    """Logistic regression on `values`; the last weight is the bias."""
    logit = weights[-1] + sum(w * x for w, x in zip(weights[:-1], values, strict=True))
    return (1 + math.tanh(logit / 2)) / 2  # the logistic function, in a form that never overflows


def _surprise(steps: Sequence[Step]) -> float:
    """In nats, 0 without tokens."""
    return min(MAX_SURPRISE, max((-logprob for step in steps for logprob in step.policy_logprobs), default=0.0))


def build_router(
    config: RoutedConfig, spec: EngineSpec, policy: Module, draft: Module | None, scorer: Scorer | None
) -> tuple[Router, StepEnd]:
    """The router of `rollout.routed`, and the end of its steps.

    Raises:
        RolloutError: no draft model, no process reward for rsd, or a learned router of another pair.
    """
    if draft is None:
        raise RolloutError(f"rollout.routed.by={config.by} needs a model that writes steps: set rollout.drafter")
    tokenizer = AutoTokenizer.from_pretrained(spec.tokenizer or spec.model)
    step_end = StepEnd(config.step_separators, tokenizer.decode, spec.eos_ids, config.max_step_tokens)
    if config.by == "entropy":
        return by_entropy(config.threshold), step_end
    if config.by == "likelihood":
        return by_likelihood(config.threshold), step_end
    if config.by == "rsd":
        if scorer is None:
            raise RolloutError("rollout.routed.by=rsd needs process rewards of steps, and no scorer was passed")
        return by_reward(scorer, config.threshold), step_end
    router = load_learned(
        config.path,
        draft=fingerprint(draft),
        policy=fingerprint(policy),
        separators=config.step_separators,
        threshold=config.threshold,
    )
    return router, step_end
