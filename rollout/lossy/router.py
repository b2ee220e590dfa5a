"""Step routers: what one is, how a decision is taken when one misbehaves, and those there are.

Each is one formula of a draft step, and a step whose score is above the threshold is the policy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specrl.rollout.lossy.pair import read_card
from specrl.rollout.lossy.steps import Candidate, Step
from specrl.rollout.types import RolloutError

READ = frozenset({"likelihood"})  # of the routers that have the policy read each draft step
WINDOW = 4  # tokens of the entropy's rolling mean
MOST = 50.0  # nats; a token that top-k or top-p rules out would be infinitely unlikely

Scorer = Callable[[Sequence[Candidate]], Sequence[float]]
"""One number per candidate. Scorers are handed in, so that nothing here knows rewards."""


@dataclass
class Router:
    """Decides for each draft step whether the policy writes that step instead."""

    score: Scorer
    """How much each candidate wants the policy; higher escalates."""
    threshold: float
    """A candidate whose score is above it is escalated to the policy."""
    low: float = 0.0
    high: float = math.inf
    """What a score can be; anything else is a fault."""
    needs: frozenset[str] = frozenset()
    """What candidates must carry: `entropy` (Step.entropies), `likelihood` (Step.policy_logprobs, which takes a pass of
    the policy over each draft step), `rival` (Candidate.rival)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a router said about a batch of candidates."""

    escalate: list[bool]
    faults: int = 0
    """Candidates that go to the policy because the router failed on them."""
    reason: str = ""
    """The first failure, in words."""


def decide(router: Router, candidates: Sequence[Candidate]) -> Decision:
    """Escalates every candidate whose score is above the threshold, or that the router could not score.

    A router that raises, or returns another number of scores, fails on all of them; a score that is NaN or out of range
    fails on its own. Failing means the policy's own path, which is always right, only slower.
    """
    try:
        scores = [float(score) for score in router.score(candidates)]
        if len(scores) != len(candidates):
            raise ValueError(f"{len(scores)} scores for {len(candidates)} candidates")
    except Exception as error:  # whatever a learned or user-written router does
        reason = f"the router failed: {type(error).__name__}: {error}"
        return Decision([True] * len(candidates), len(candidates), reason)
    bad = [score for score in scores if not router.low <= score <= router.high]  # NaN is in no range
    reason = f"the router gave {bad[0]}, not in {router.low:g}..{router.high:g}" if bad else ""
    most = min(router.threshold, router.high)
    return Decision([not router.low <= score <= most for score in scores], len(bad), reason)


def by_entropy(threshold: float, window: int = WINDOW) -> Router:
    """Escalates a step whose largest rolling mean of the draft's entropy is above the threshold, in nats.

    After Entropy Adaptive Decoding (arXiv 2502.06833), which switches models at every token; here per step. A step
    shorter than `window` tokens is averaged whole.
    """

    def peak(values: Sequence[float]) -> float:
        width = min(window, len(values))
        return max(sum(values[i : i + width]) / width for i in range(len(values) - width + 1))

    return Router(lambda found: [peak(c.step.entropies) for c in found], threshold, needs=frozenset({"entropy"}))


def by_likelihood(threshold: float) -> Router:
    """Escalates a step with a token whose log-prob under the policy is below minus the threshold, in nats.

    Nothing to train. One token decides, as one wrong number makes a step wrong however likely the rest of it is. It
    costs a pass of the policy over each draft step, which is a verification: at threshold 0 a response is the policy's
    own by exact speculative decoding (but for tokens whose probability rounds to 1, which stand), and a higher
    threshold keeps more of the draft's text.
    """
    return Router(lambda found: [-min(c.step.policy_logprobs) for c in found], threshold, needs=READ)


def by_reward(scorer: Scorer, least: float = 0.7) -> Router:
    """Reward-guided speculative decoding (RSD, arXiv 2501.19324): escalates a step whose process reward s_d is low.

    Also where the policy would do no better.

    Args:
        scorer: process reward of each candidate step, 0 to 1.
        least: RSD's threshold on s_d; the published code takes 0.7.
    """
    return Router(lambda found: [1 - reward for reward in scorer(found)], 1 - least, high=1.0)


def by_advantage(advantage: Scorer, threshold: float = 0.0) -> Router:
    """The oracle of Arbitrage (arXiv 2512.05033): escalates by the advantage s_t - s_d of the policy's step.

    It sees both models' steps from the same prefix, so it saves nothing: it is the bound of every other router, and the
    teacher of the learned one. Best for the sum of step scores when decisions do not influence later steps.

    Args:
        advantage: s_t - s_d of candidates that carry their rival, -1 to 1.
        threshold: 0 escalates exactly where there is something to gain.
    """
    needs = frozenset({"rival", "likelihood"})  # reading first spares the policy what both steps begin with
    return Router(advantage, threshold, low=-1.0, high=1.0, needs=needs)


def learned(weights: Sequence[float], threshold: float = 0.5) -> Router:
    """After Arbitrage (arXiv 2512.05033): escalates where the policy's step is probably worth more than the draft's.

    Arbitrage asks a classifier of the text. This one asks what the policy finds unlikely, now and before: a step that
    the policy doubts is likely wrong, and after an earlier mistake there is less to gain.

    Args:
        weights: of `features`, in their order, and last the bias.
        threshold: probability, 0 to 1; higher keeps more draft steps.
    """
    return Router(lambda found: [probability(weights, features(c)) for c in found], threshold, high=1.0, needs=READ)


def load_learned(
    folder: str | Path, *, draft: str, policy: str, separators: Sequence[str], threshold: float = 0.5
) -> Router:
    """The router that `specrl.train_router` wrote to `folder`.

    Args: draft, policy: fingerprints of the pair at work; separators: where its steps end.

    Raises:
        RolloutError: it belongs to another pair or other steps, or it is none.
    """
    card = read_card(folder, "arbitrage", draft=draft, policy=policy, separators=list(separators))
    weights = card.get("weights")
    if not (isinstance(weights, list) and len(weights) == 3 and all(isinstance(w, float) for w in weights)):
        raise RolloutError(f"the router in {folder} has weights={weights}, not two and a bias; train it again")
    return learned(weights, threshold)


def features(candidate: Candidate) -> tuple[float, float]:
    """log(1 + s) for s = -log p of the policy's least likely token: of the step, and of all before it."""
    return math.log1p(_surprise([candidate.step])), math.log1p(_surprise(candidate.history))


def probability(weights: Sequence[float], values: Sequence[float]) -> float:
    """Logistic regression on `values`; the last weight is the bias."""
    logit = weights[-1] + sum(w * x for w, x in zip(weights[:-1], values, strict=True))
    return (1 + math.tanh(logit / 2)) / 2  # the logistic function, which overflows for no logit


def _surprise(steps: Sequence[Step]) -> float:
    """In nats, 0 without any token."""
    return min(MOST, max((-logprob for step in steps for logprob in step.policy_logprobs), default=0.0))


SERVED = {"entropy": by_entropy, "likelihood": by_likelihood}
"""Routers that need nothing but their threshold."""
