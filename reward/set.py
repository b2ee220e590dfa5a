"""A weighted sum of rewards, and when their failures stop the run."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile

from specrl.reward.base import LimitError, Outcome, Reward, RewardError, Sample, checked_outcomes
from specrl.reward.config import RewardConfig
from specrl.reward.memo import Memo

FAILED_SHARE = 0.05
"""Of the rows, which may have no score because their reward failed; more stop the run."""
WINDOW_PROMPTS = 100  # the rows of a prompt fail together, so the size of a sample is counted in prompts
WINDOW_BATCHES = 4
MIN_FAILED_ROWS = 16  # fewer rows than this may all fail by chance


@dataclass(frozen=True)
class RewardResult:
    """Scores of one batch; every list has one entry per sample, every dict one entry per reward name."""

    total: list[float | None]  # weighted sum; None when a reward with a weight gave no score: mask this row
    parts: dict[str, list[float | None]] = field(default_factory=dict)  # before weighting
    timeouts: dict[str, int] = field(default_factory=dict)  # rows over their deadline
    over_limit: dict[str, int] = field(default_factory=dict)  # rows over a limit of the workers by the text's own doing
    reused: dict[str, int] = field(default_factory=dict)  # rows that kept an earlier score of a deterministic reward


def check_settings(names: Sequence[str], weights: Sequence[float]) -> None:
    """Raises RewardError when rewards with these names and weights cannot be added up."""
    for problem in RewardConfig(list(names), list(weights)).problems():
        raise RewardError(problem)
    if not any(weights):
        raise RewardError(f"reward.weights must not all be zero, got {weights}")
    if len(set(names)) != len(names):
        raise RewardError(f"reward.functions has a name twice, and results are reported by name: {names}")


class RewardSet:
    """Several rewards with weights; `score(samples)` adds them up.

    A row is checked when it is scored first (`Reward.check`); one that cannot be scored has no score.

    A reward stops the run with RewardError when more than FAILED_SHARE of its latest rows failed, or none has a score
    (see `FailureWindow`). A text that a healthy worker cannot score within its limits is no failure: it has no
    score, or 0.0 with `on_limit="zero"`. A zero needs a second attempt, as a stalled machine must not become a 0.
    """

    def __init__(self, rewards: Sequence[Reward], weights: Sequence[float] = (), on_limit: str = "mask"):
        names = [reward.name for reward in rewards]
        weights = list(weights) or [1.0] * len(names)
        check_settings(names, weights)
        self.rewards = dict(zip(names, rewards, strict=True))
        self.weights = dict(zip(names, weights, strict=True))
        self.on_limit = on_limit
        self._failures = {name: FailureWindow() for name in names}
        self._memos = {name: Memo() for name in self._declared("deterministic")}
        self._sound = {name: Memo() for name in names}  # 1.0 for each row that can be scored

    @property
    def verifiable(self) -> str:
        """The first reward whose scores are correctness, empty if there is none. Its weight may be 0."""
        return next(iter(self._declared("verifiable")), "")

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Scores one batch. Raises RewardError when a reward is broken rather than one sample bad (see the class)."""
        samples = list(samples)
        result = RewardResult([0.0] * len(samples))
        for name in self.rewards:
            outcomes: list[Outcome] = []
            reused = 0
            if name in self._memos:
                outcomes, reused = self._memos[name].outcomes(samples, partial(self._outcomes, name))
            elif samples:
                outcomes = self._outcomes(name, samples)
            result.reused[name] = reused
            self._record(result, name, samples, outcomes)
        return result

    def check(self, name: str, samples: Sequence[Sample]) -> list[Exception | None]:
        """Why a row cannot be scored by a reward, whatever the response; None for a row that can be."""
        check = getattr(self.rewards[name], "check", None)
        if check is None:
            return [None] * len(samples)
        rows = [replace(sample, completion="") for sample in samples]
        found, _ = self._sound[name].outcomes(rows, lambda new: [flaw or 1.0 for flaw in check(new)])
        return [outcome if isinstance(outcome, Exception) else None for outcome in found]

    @property
    def first_failure(self) -> str:
        """The first of the latest rows that have no score, and why, with the traceback; empty if all have one."""
        return next((failure for window in self._failures.values() for failure in window.failures), "")

    def close(self) -> None:
        """Ends the workers of the rewards that have some."""
        for reward in self.rewards.values():
            getattr(reward, "close", lambda: None)()

    def _declared(self, promise: str) -> list[str]:
        return [name for name, reward in self.rewards.items() if getattr(reward, promise, False) is True]

    def _outcomes(self, name: str, samples: list[Sample]) -> list[Outcome]:
        outcomes: list[Outcome] = [*self.check(name, samples)]
        self._score(name, samples, outcomes, [i for i, flaw in enumerate(outcomes) if flaw is None])
        if self.on_limit == "zero":
            self._score(name, samples, outcomes, [i for i, outcome in enumerate(outcomes) if _caused_by_text(outcome)])
        return outcomes

    def _score(self, name: str, samples: list[Sample], outcomes: list[Outcome], at: list[int]) -> None:
        """Scores the samples at these indices and writes their outcomes."""
        scored = checked_outcomes(self.rewards[name], [samples[i] for i in at]) if at else []
        for i, outcome in zip(at, scored, strict=True):
            outcomes[i] = outcome

    def _record(self, result: RewardResult, name: str, samples: list[Sample], outcomes: list[Outcome]) -> None:
        """Adds one reward's outcomes to the result. Raises RewardError when too many of its latest rows failed."""
        result.timeouts[name] = sum(isinstance(outcome, TimeoutError) for outcome in outcomes)
        result.over_limit[name] = sum(map(_caused_by_text, outcomes))
        if self.on_limit == "zero":
            outcomes = [0.0 if _caused_by_text(outcome) else outcome for outcome in outcomes]
        result.parts[name] = [outcome if isinstance(outcome, float) else None for outcome in outcomes]
        weight = self.weights[name]
        if weight:
            for i, score in enumerate(result.parts[name]):
                total = result.total[i]
                result.total[i] = None if total is None or score is None else total + weight * score
        self._failures[name].add(samples, outcomes)
        if broken := self._failures[name].broken():
            raise RewardError(
                f"reward {name!r} gave no score for {broken[0]}. Rows without a score are masked, so training would go "
                f"on with little data. First failure, {broken[1]}"
            )


@dataclass(frozen=True)
class _Row:
    prompt: str
    scored: bool
    failure: str
    """What happened; empty for a score, and where the text itself exceeded a limit."""


class FailureWindow:
    """Decides from its latest batches whether a reward is broken: at least 4 batches with at least 100 prompts.

    It is broken when

    - more than FAILED_SHARE of the rows failed, in more than one batch and for more than one prompt, so that neither a
      bad step nor a poisoned prompt decides. The missing rest of a window that is not full yet counts as scored;
    - the latest batches have no score at all: 16 failed rows or more, of more than one prompt;
    - a full window has no score at all, whatever the reason.

    A text that exceeds a limit is no failure.
    """

    def __init__(self) -> None:
        self._batches: deque[list[_Row]] = deque()

    def add(self, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> None:
        """Adds one batch and drops the oldest ones that a full window does not need."""
        if not samples:
            return
        pairs = zip(samples, outcomes, strict=True)
        self._batches.append([_Row(s.prompt, isinstance(o, float), _failure(s, o)) for s, o in pairs])
        while _is_full([*self._batches][1:]):
            self._batches.popleft()

    @property
    def failures(self) -> list[str]:
        """What happened to each row that failed."""
        return [row.failure for batch in self._batches for row in batch if row.failure]

    def broken(self) -> tuple[str, str] | None:
        """How many rows of how many have no score, and the first failure; None when the reward is not broken."""
        if not self._nothing_scored() and not self._too_many():
            return None
        rows = [row for batch in self._batches for row in batch]
        count = len(self.failures) or sum(not row.scored for row in rows)
        first = next(iter(self.failures), "every text was over reward.timeout_s or reward.memory_mb")
        return f"{count} of the last {len(rows)} rows", first

    def _nothing_scored(self) -> bool:
        latest = [*takewhile(lambda batch: not any(row.scored for row in batch), reversed(self._batches))]
        failed = [row.prompt for batch in latest for row in batch if row.failure]
        return _is_full(latest) or (len(failed) >= MIN_FAILED_ROWS and len({*failed}) > 1)

    def _too_many(self) -> bool:
        failing = [prompts for batch in self._batches if (prompts := {row.prompt for row in batch if row.failure})]
        if len(failing) < 2 or len(set().union(*failing)) < 2:
            return False
        rows_of_full_window = sum(map(len, self._batches)) * max(1.0, WINDOW_PROMPTS / _prompts(self._batches))
        return len(self.failures) > max(1.0, FAILED_SHARE * rows_of_full_window)


def _prompts(batches: Iterable[list[_Row]]) -> int:
    return sum(len({row.prompt for row in batch}) for batch in batches)


def _is_full(batches: Sequence[list[_Row]]) -> bool:
    return len(batches) >= WINDOW_BATCHES and _prompts(batches) >= WINDOW_PROMPTS


def _caused_by_text(outcome: Outcome) -> bool:
    """Whether a row has no score because scoring its text takes more than a worker may use."""
    return isinstance(outcome, LimitError) and outcome.caused_by_text


def _failure(sample: Sample, outcome: Outcome) -> str:
    """The row and why it has no score, with the traceback; empty for a score, or a text over a limit."""
    if isinstance(outcome, float) or _caused_by_text(outcome):
        return ""
    row = f"prompt {sample.prompt[-80:]!r}, completion ending {sample.completion[-80:]!r}, answer {sample.answer!r:.80}"
    if isinstance(outcome, Exception):
        return f"{row}:\n{''.join(traceback.format_exception(outcome)).rstrip()}"
    return f"{row}: the reward returned None (no score)"
