"""Reasoning steps, and the routers that decide which draft steps the policy writes instead.

Each router scores a step and has a threshold for the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from specrl.rollout.checks import check
from specrl.rollout.config import RolloutConfig
from specrl.rollout.sections import RoutedConfig

Source = Literal["draft", "policy"]
End = Literal["separator", "eos", "cap", "broken"]
"""Why a step ended: by a separator, by an EOS id, at a cap in tokens, or by logits that are NaN or infinite."""


@dataclass(slots=True)
class Step:
    """Tokens up to and including a separator or an EOS id. All lists have the step's length."""

    source: Source
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each token under its source, after temperature, top-k and top-p."""
    policy_logprobs: list[float] = field(default_factory=list)
    """Log-prob of each token under the policy; empty while the policy has not read a draft step."""
    end: End | None = None
    """None while the step is being written."""

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Appends tokens, with their log-probs under the source."""
        self.tokens += tokens
        self.logprobs += logprobs


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft step to decide on, with everything before it."""

    row: int
    """Index of the request in its batch, by which scorers find what else they know of the request."""
    prompt: Sequence[int]
    history: Sequence[Step]
    """The steps kept so far."""
    step: Step
    """The draft's continuation."""
    rival: Step | None = None
    """The policy's continuation; only for routers that need it."""

    @property
    def response(self) -> list[int]:
        """The response up to the candidate."""
        return [token for step in self.history for token in step.tokens]


class StepEnd:
    """Decides whether a step has ended, from its text: a separator may span tokens or be part of one.

    Args:
        separators: texts that end a step, such as ["\\n\\n"], and belong to it.
        decode: token ids to text.
        eos_ids: ids that end the response.
        max_tokens: a longer step is cut, and its row goes to the policy.
        vocab: ids below it have text.

    Raises:
        RolloutError: no separator, an empty one, or a cap below 1.
    """

    def __init__(
        self,
        separators: Collection[str],
        decode: Callable[[list[int]], str | list[str]],
        eos_ids: Collection[int],
        max_tokens: int,
        vocab: int,
    ):
        check(RolloutConfig(routed=RoutedConfig(separators=[*separators], max_step_tokens=max_tokens)))
        self.eos_ids = frozenset(eos_ids)
        self.max_tokens = max_tokens
        self._separators = tuple(separators)
        self._decode = decode
        self._vocab = vocab

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids with which a step may end: those whose text has the last character of a separator."""
        last_characters = {separator[-1] for separator in self._separators}
        ids = range(self._vocab)
        return frozenset(token for token in ids if not last_characters.isdisjoint(self._text([token])))

    def __call__(self, tokens: Sequence[int]) -> End | None:
        """Why the step `tokens` ends with its last token, None if it continues.

        It must be called at least after every token of `stop_ids`.
        """
        if tokens[-1] in self.eos_ids:
            return "eos"
        if tokens[-1] in self.stop_ids and any(separator in self._text(tokens) for separator in self._separators):
            return "separator"
        return "cap" if len(tokens) >= self.max_tokens else None

    def blank(self, tokens: Sequence[int]) -> bool:
        """True for a step without text, such as a lone separator. EOS ids do not count as text."""
        return not self._text([t for t in tokens if t not in self.eos_ids]).strip()

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._decode([*tokens]))


Scorer = Callable[[Sequence[Candidate]], Sequence[float]]
"""One number per candidate."""


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
    """What candidates must contain: `likelihood` (Step.policy_logprobs, for which the policy reads each draft step),
    `rival` (Candidate.rival). A router that needs neither decides before any pass of the policy."""
    usual_gap: float | None = None
    """Of a learned router: by how many nats a token the steps that it kept when it was trained were more likely under
    the draft model than under the policy."""


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


def by_likelihood(threshold: float) -> Router:
    """Escalates a step with a token whose log-prob under the policy is below minus the threshold, in nats.

    Needs no training. One token decides, as one wrong number makes a step wrong however likely the rest of it is. The
    policy reads each draft step in a pass, which is a verification: at threshold 0 this is exact speculative decoding
    (except that tokens whose probability rounds to 1 are accepted), and a higher threshold keeps more of the draft.
    """
    needs = frozenset({"likelihood"})
    return Router(lambda steps: [-min(c.step.policy_logprobs) for c in steps], threshold, needs=needs)


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
