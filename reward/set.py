"""Several rewards added up, and when their failures are too many to go on."""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from specrl.reward.base import LimitError, Outcome, Reward, RewardError, Sample, checked_outcomes
from specrl.reward.config import RewardConfig
from specrl.reward.memo import Memo

WINDOW_PROMPTS = 100  # the rows of a prompt fail together, so prompts are what a share is measured over
WINDOW_BATCHES = 4
FEW_ROWS = 16  # fewer than this that all fail may be chance


@dataclass(frozen=True)
class RewardResult:
    """Scores of one batch; every list has one entry per sample, every dict one entry per reward name."""

    total: list[float | None]  # weighted sum; None when a reward with a weight gave no score: mask this row
    parts: dict[str, list[float | None]] = field(default_factory=dict)  # before weighting
    timeouts: dict[str, int] = field(default_factory=dict)  # rows over their deadline
    errors: dict[str, int] = field(default_factory=dict)  # rows whose reward raised, crashed, or returned no number
    missing: dict[str, int] = field(default_factory=dict)  # rows for which the reward itself returned None
    over_limit: dict[str, int] = field(default_factory=dict)  # of timeouts and errors, those of the text's own doing
    reused: dict[str, int] = field(default_factory=dict)  # rows that kept an earlier score of a deterministic reward
    first_failure: dict[str, str] = field(default_factory=dict)  # with its traceback, where a reward failed

    @property
    def failed(self) -> dict[str, int]:
        """Rows without a score, for whatever reason."""
        return {name: part.count(None) for name, part in self.parts.items()}


def check_settings(names: Sequence[str], weights: Sequence[float], max_failure_ratio: float) -> None:
    """RewardError when rewards of these names cannot be added up so."""
    for problem in RewardConfig(list(names), list(weights)).problems():
        raise RewardError(problem)
    if not any(weights):
        raise RewardError(f"reward.weights must not all be zero, got {weights}")
    if len(set(names)) != len(names):
        raise RewardError(f"reward.functions has a name twice, and results are reported by name: {names}")
    if not 0 <= max_failure_ratio <= 1:
        raise RewardError(f"reward.max_failure_ratio is a share of rows from 0 to 1, got {max_failure_ratio}")


class RewardSet:
    """Several rewards with weights; `score(samples)` adds them up.

    A reward stops the run with RewardError when more than `max_failure_ratio` of its latest rows failed, or none has a
    score (see `Failures`). A text that a healthy worker cannot score within its limits is no failure: it has no score,
    or 0.0 with `on_limit="zero"`, for which it is asked twice, as a stalled machine must not become a 0.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        weights: Sequence[float] = (),
        max_failure_ratio: float = 0.05,
        on_limit: str = "mask",
    ):
        names = [reward.name for reward in rewards]
        weights = list(weights) or [1.0] * len(names)
        check_settings(names, weights, max_failure_ratio)
        self.rewards = dict(zip(names, rewards, strict=True))
        self.weights = dict(zip(names, weights, strict=True))
        self.max_failure_ratio, self.on_limit = max_failure_ratio, on_limit
        self._failures = {name: Failures(max_failure_ratio) for name in names}
        self._memos = {r.name: Memo() for r in rewards if getattr(r, "deterministic", False) is True}

    @property
    def verifiable(self) -> str:
        """The first reward whose scores are correctness, empty where there is none. Its weight may be 0."""
        says = (name for name, reward in self.rewards.items() if getattr(reward, "verifiable", False) is True)
        return next(says, "")

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Score one batch. Raises RewardError when a reward is broken rather than one sample bad (see the class)."""
        samples = list(samples)
        result = RewardResult([0.0] * len(samples))
        for name in self.rewards:
            if name in self._memos:
                outcomes, reused = self._memos[name].outcomes(samples, lambda new, name=name: self._ask(name, new))
            else:
                outcomes, reused = self._ask(name, samples) if samples else [], 0
            result.reused[name] = reused
            self._record(result, name, samples, outcomes)
        return result

    def close(self) -> None:
        """Ends the workers of the rewards that have some."""
        for reward in self.rewards.values():
            getattr(reward, "close", lambda: None)()

    def _ask(self, name: str, samples: list[Sample]) -> list[Outcome]:
        outcomes = checked_outcomes(self.rewards[name], samples)
        over = [i for i, outcome in enumerate(outcomes) if self.on_limit == "zero" and _of_text(outcome)]
        if over:
            again = checked_outcomes(self.rewards[name], [samples[i] for i in over])
            for i, outcome in zip(over, again, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _record(self, result: RewardResult, name: str, samples: list[Sample], outcomes: list[Outcome]) -> None:
        kinds = [_kind(outcome) for outcome in outcomes]
        result.timeouts[name] = kinds.count("timeout")
        result.errors[name] = kinds.count("error")
        result.missing[name] = kinds.count("missing")
        result.over_limit[name] = sum(map(_of_text, outcomes))
        if any(kinds):
            first = next(i for i, kind in enumerate(kinds) if kind)
            result.first_failure[name] = _describe(samples[first], outcomes[first])
        if self.on_limit == "zero":
            outcomes = [0.0 if _of_text(outcome) else outcome for outcome in outcomes]
        part = result.parts[name] = [outcome if isinstance(outcome, float) else None for outcome in outcomes]
        weight = self.weights[name]
        for i, value in enumerate(part):
            if weight and result.total[i] is not None:
                result.total[i] = None if value is None else result.total[i] + weight * value
        self._failures[name].add(samples, outcomes)
        if broken := self._failures[name].broken():
            count, first = broken
            self._failures[name] = Failures(self.max_failure_ratio)
            raise RewardError(
                f"reward {name!r} gave no score for {count}, more than reward.max_failure_ratio="
                f"{self.max_failure_ratio:g} allows; rows without a score are masked, so training would go on with "
                f"little data. First failure, {first}"
            )


@dataclass(frozen=True)
class _Batch:
    rows: int
    prompts: int
    kinds: Counter[str]  # of the rows without a score
    failed: list[str]  # prompts of the rows without a score that is not their text's own doing
    first: str


class Failures:
    """Judges one reward over its latest batches: at least 4, with at least 100 prompts (in two batches one is two).

    It is broken when

    - more than `ratio` of the rows failed, in more than one batch and for more than one prompt: neither a bad step nor
      a poisoned prompt decides. A window that is not full yet is judged as if the rest of it went well;
    - the latest batches have no score at all: 16 failed rows and more than one prompt of them;
    - a full window has no score at all, whatever the reason.

    A row that is over a limit by its text's own doing is no failure. With `ratio` 0 the first failure decides, with 1
    nothing does.
    """

    def __init__(self, ratio: float):
        self.ratio = ratio
        self._batches: deque[_Batch] = deque()

    def add(self, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> None:
        """Take in one batch; what the window can do without leaves it."""
        if not samples:
            return
        lost = [(s, o) for s, o in zip(samples, outcomes, strict=True) if not isinstance(o, float)]
        self._batches.append(
            _Batch(
                rows=len(samples),
                prompts=len({sample.prompt for sample in samples}),
                kinds=Counter("over a limit" if _of_text(outcome) else _kind(outcome) for _, outcome in lost),
                failed=[sample.prompt for sample, outcome in lost if not _of_text(outcome)],
                first=_describe(*min(lost, key=lambda row: _of_text(row[1]))) if lost else "",
            )
        )
        while len(self._batches) > WINDOW_BATCHES and self._prompts - self._batches[0].prompts >= WINDOW_PROMPTS:
            self._batches.popleft()

    @property
    def _prompts(self) -> int:
        return sum(batch.prompts for batch in self._batches)

    def broken(self) -> tuple[str, str] | None:
        """How many rows of how many, and the first failure; None when there are not too many."""
        failed = sum(len(batch.failed) for batch in self._batches)
        if not self._too_many(failed):
            return None
        kinds = sum((batch.kinds for batch in self._batches), Counter())
        first = next(batch.first for batch in self._batches if batch.failed or (not failed and batch.first))
        rows = f"{failed or kinds.total()} of the last {sum(batch.rows for batch in self._batches)} rows"
        return f"{rows} ({', '.join(f'{count} {kind}' for kind, count in kinds.items())})", first

    def _too_many(self, failed: int) -> bool:
        if self.ratio <= 0 or self.ratio >= 1:
            return self.ratio <= 0 < failed
        return self._nothing_scored() or self._above_the_ratio(failed)

    def _nothing_scored(self) -> bool:
        latest = list(takewhile(lambda batch: batch.kinds.total() == batch.rows, reversed(self._batches)))
        full = len(latest) >= WINDOW_BATCHES and sum(batch.prompts for batch in latest) >= WINDOW_PROMPTS
        groups = sum(len(set(batch.failed)) for batch in latest)
        return full or (groups > 1 and sum(len(batch.failed) for batch in latest) >= FEW_ROWS)

    def _above_the_ratio(self, failed: int) -> bool:
        failing = [set(batch.failed) for batch in self._batches if batch.failed]
        rows = sum(batch.rows for batch in self._batches)
        in_full = rows * max(1.0, WINDOW_PROMPTS / max(1, self._prompts))
        return len(failing) > 1 and len(set().union(*failing)) > 1 and failed > max(1.0, self.ratio * in_full)


def _of_text(outcome: Outcome) -> bool:
    """Whether a row has no score because its text takes more than a worker may use."""
    return isinstance(outcome, LimitError) and outcome.of_text


def _kind(outcome: Outcome) -> str:
    """Why a row has no score: "missing", "timeout" or "error"; empty when it has one."""
    if outcome is None:
        return "missing"
    if isinstance(outcome, float):
        return ""
    return "timeout" if isinstance(outcome, TimeoutError) else "error"


def _describe(sample: Sample, outcome: Outcome) -> str:
    """The row and what happened, with its traceback."""
    where = (
        f"prompt {sample.prompt[-80:]!r}, completion ending {sample.completion[-80:]!r}, answer {sample.answer!r:.80}"
    )
    if outcome is None:
        return f"{where}: the reward returned None (no score)"
    return f"{where}:\n{''.join(traceback.format_exception(outcome)).rstrip()}"
