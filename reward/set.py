"""A weighted sum of rewards, and when their failures stop the run."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import takewhile

from specrl.reward.base import LimitError, Outcome, Reward, RewardError, Sample, checked_outcomes
from specrl.reward.config import RewardConfig
from specrl.reward.memo import Memo

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

    A reward stops the run with RewardError when more than `max_failure_ratio` of its latest rows failed, or none has a
    score (see `FailureWindow`). A text that a healthy worker cannot score within its limits is no failure: it has no
    score, or 0.0 with `on_limit="zero"`. A zero needs a second attempt, as a stalled machine must not become a 0.
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
        check_settings(names, weights)
        self.rewards = dict(zip(names, rewards, strict=True))
        self.weights = dict(zip(names, weights, strict=True))
        self.max_failure_ratio = max_failure_ratio
        self.on_limit = on_limit
        self._failures = {name: FailureWindow(max_failure_ratio) for name in names}
        deterministic = [
            name for name, reward in self.rewards.items() if getattr(reward, "deterministic", False) is True
        ]
        self._memos = {name: Memo() for name in deterministic}
        self._sound: dict[str, set[bytes]] = {name: set() for name in names}  # digests of rows

    @property
    def verifiable(self) -> str:
        """The first reward whose scores are correctness, empty if there is none. Its weight may be 0."""
        names = (name for name, reward in self.rewards.items() if getattr(reward, "verifiable", False) is True)
        return next(names, "")

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
        texts = [repr((sample.answer, sample.fields)) for sample in samples]
        rows = [blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest() for text in texts]
        new = {row: sample for row, sample in zip(rows, samples, strict=True) if row not in self._sound[name]}
        flaws = dict(zip(new, check([*new.values()]), strict=True))
        self._sound[name] |= {row for row, flaw in flaws.items() if flaw is None}
        return [flaws.get(row) for row in rows]

    def close(self) -> None:
        """Ends the workers of the rewards that have some."""
        for reward in self.rewards.values():
            getattr(reward, "close", lambda: None)()

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
            count, failure = broken
            raise RewardError(
                f"reward {name!r} gave no score for {count}, more than reward.max_failure_ratio="
                f"{self.max_failure_ratio:g} allows; rows without a score are masked, so training would go on with "
                f"little data. First failure, {failure}"
            )


@dataclass(frozen=True)
class _Batch:
    rows: int
    prompts: int
    unscored: int
    failed_prompts: list[str]  # of each unscored row, except where the text itself exceeded a limit
    first_failure: str


class FailureWindow:
    """Decides from its latest batches whether a reward is broken: at least 4 batches with at least 100 prompts.

    It is broken when

    - more than `ratio` of the rows failed, in more than one batch and for more than one prompt, so that neither a bad
      step nor a poisoned prompt decides. The missing rest of a window that is not full yet counts as scored;
    - the latest batches have no score at all: 16 failed rows or more, of more than one prompt;
    - a full window has no score at all, whatever the reason.

    A text that exceeds a limit is no failure. With `ratio` 0 the first failure decides, with 1 nothing does.
    """

    def __init__(self, ratio: float):
        self.ratio = ratio
        self._batches: deque[_Batch] = deque()

    def add(self, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> None:
        """Adds one batch and drops the oldest ones that a full window does not need."""
        if not samples:
            return
        unscored = [(s, o) for s, o in zip(samples, outcomes, strict=True) if not isinstance(o, float)]
        failed = [(sample, outcome) for sample, outcome in unscored if not _caused_by_text(outcome)]
        example = (failed or unscored)[:1]
        self._batches.append(
            _Batch(
                rows=len(samples),
                prompts=len({sample.prompt for sample in samples}),
                unscored=len(unscored),
                failed_prompts=[sample.prompt for sample, _ in failed],
                first_failure=_describe(*example[0]) if example else "",
            )
        )
        while len(self._batches) > WINDOW_BATCHES and self._prompts - self._batches[0].prompts >= WINDOW_PROMPTS:
            self._batches.popleft()

    @property
    def _prompts(self) -> int:
        return sum(batch.prompts for batch in self._batches)

    def broken(self) -> tuple[str, str] | None:
        """How many rows of how many failed, and the first failure; None when the reward is not broken."""
        failed = sum(len(batch.failed_prompts) for batch in self._batches)
        if not self._too_many(failed):
            return None
        first = next(b.first_failure for b in self._batches if (b.failed_prompts if failed else b.unscored))
        count = failed or sum(batch.unscored for batch in self._batches)
        return f"{count} of the last {sum(batch.rows for batch in self._batches)} rows", first

    def _too_many(self, failed: int) -> bool:
        if self.ratio <= 0:
            return failed > 0
        if self.ratio >= 1:
            return False
        return self._nothing_scored() or self._above_ratio(failed)

    def _nothing_scored(self) -> bool:
        latest = list(takewhile(lambda batch: batch.unscored == batch.rows, reversed(self._batches)))
        full = len(latest) >= WINDOW_BATCHES and sum(batch.prompts for batch in latest) >= WINDOW_PROMPTS
        prompts = sum(len(set(batch.failed_prompts)) for batch in latest)
        return full or (prompts > 1 and sum(len(batch.failed_prompts) for batch in latest) >= MIN_FAILED_ROWS)

    def _above_ratio(self, failed: int) -> bool:
        failing = [set(batch.failed_prompts) for batch in self._batches if batch.failed_prompts]
        if len(failing) < 2 or len(set().union(*failing)) < 2:
            return False
        rows = sum(batch.rows for batch in self._batches)
        rows_of_full_window = rows * max(1.0, WINDOW_PROMPTS / max(1, self._prompts))
        return failed > max(1.0, self.ratio * rows_of_full_window)


def _caused_by_text(outcome: Outcome) -> bool:
    """Whether a row has no score because scoring its text takes more than a worker may use."""
    return isinstance(outcome, LimitError) and outcome.caused_by_text


def _describe(sample: Sample, outcome: Outcome) -> str:
    """The row and what happened, with its traceback."""
    row = f"prompt {sample.prompt[-80:]!r}, completion ending {sample.completion[-80:]!r}, answer {sample.answer!r:.80}"
    if isinstance(outcome, Exception):
        return f"{row}:\n{''.join(traceback.format_exception(outcome)).rstrip()}"
    return f"{row}: the reward returned None (no score)"
