"""What a reward is and how several are combined: text in, number out.

The rule of this package: an infrastructure failure never becomes a reward. A row that could not be scored is None,
which masks it from training, and it is counted; many such rows stop the run with the first failure's traceback. A text
that takes more time or memory than a healthy worker may use is not such a failure: it is masked, or 0 by option.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from reward.config import RewardConfig
from reward.failures import Failures, describe, kind, of_text
from reward.memo import Memo

LARGEST = 1e15  # trainers square rewards in float32 for the group's standard deviation


class RewardError(RuntimeError):
    """Rewards cannot be computed and the run should stop; the message says what to change."""


@dataclass(frozen=True)
class Sample:
    """What a reward sees of one rollout."""

    prompt: str  # the prompt as the model got it, decoded
    completion: str  # the response, decoded without special tokens
    answer: str | None = None  # the dataset's reference answer, if it has one
    fields: dict[str, Any] = field(default_factory=dict)  # the row's other dataset columns


Outcome = float | None | Exception


class Reward(Protocol):
    """Scores samples. Each score depends on its own sample only, so a batch may be cut or repeated row by row.

    Returns one number per sample, None for one that cannot be scored (the row is masked and counted, never 0).
    Two optional methods: `close()` releases resources; `outcomes(samples)` is like a call, but in the place of a
    None it may leave the exception that prevented the score, and is what RewardSet uses when it exists.
    An optional attribute: `deterministic = True` promises that a score depends on nothing but the sample (no time, no
    randomness, no judge that changes); RewardSet then asks once for each sample, not every time it comes.
    """

    name: str

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]: ...


def _checked(value: Any) -> Outcome:
    """A reward's return value as a finite float; None and exceptions pass, anything else becomes an exception."""
    if value is None or isinstance(value, Exception):
        return value
    try:
        if not hasattr(value, "__float__"):  # text has none, though float() would read it
            raise TypeError(f"a score must be a number or None, got {type(value).__name__} {value!r:.80}")
        number = float(value)
        if not abs(number) <= LARGEST:
            raise ValueError(f"a score must be finite and at most {LARGEST:g} in size, got {number}")
        return number
    except Exception as error:
        return error


def checked_outcomes(reward: Reward, samples: Sequence[Sample]) -> list[Outcome]:
    """One float, None or exception per sample. RewardError passes through: it means that nothing can be scored.

    When the whole call raises or returns the wrong number of scores, it is repeated sample by sample, so that one bad
    sample costs only its own score.
    """
    function = getattr(reward, "outcomes", reward)
    try:
        returned = function(samples)
        if isinstance(returned, (str, bytes, Mapping, set, frozenset)) or not hasattr(returned, "__len__"):
            raise TypeError(f"a reward must return a list of scores, got {type(returned).__name__} {returned!r:.80}")
        if len(returned) != len(samples):
            raise ValueError(f"a reward must return one score per sample: {len(returned)} for {len(samples)} samples")
    except RewardError:
        raise
    except Exception as error:
        if len(samples) == 1:
            return [error]
        return [checked_outcomes(reward, [sample])[0] for sample in samples]
    return [_checked(value) for value in returned]


def scores(reward: Reward, samples: Sequence[Sample]) -> list[float | None]:
    """The scores of a reward that reports `outcomes`, with None in the place of exceptions."""
    return [None if isinstance(outcome, Exception) else outcome for outcome in checked_outcomes(reward, samples)]


@dataclass(frozen=True)
class RewardResult:
    """Scores of one batch; every list has one entry per sample, every dict one entry per reward name."""

    total: list[float | None]  # weighted sum; None when a reward with a weight gave no score: mask this row
    parts: dict[str, list[float | None]]  # before weighting
    timeouts: dict[str, int]  # rows over their deadline
    errors: dict[str, int]  # rows whose reward raised, crashed its worker or returned something else than a number
    missing: dict[str, int]  # rows for which the reward itself returned None
    over_limit: dict[
        str, int
    ]  # rows over the deadline or memory of workers that answered others; `timeouts` or `errors`
    reused: dict[str, int]  # rows that kept an earlier score, as the reward is deterministic
    seconds: dict[str, float]  # wall-clock time
    first_failure: dict[str, str]  # for rewards that failed somewhere: the first failure, with its traceback

    @property
    def failed(self) -> dict[str, int]:
        """Rows without a score, for whatever reason."""
        return {name: part.count(None) for name, part in self.parts.items()}


def check_settings(names: Sequence[str], weights: Sequence[float], max_failure_ratio: float) -> None:
    """RewardError when rewards of these names cannot be added up so."""
    if not names:
        raise RewardError("reward.functions is empty; name at least one reward, for example [math]")
    if len(weights) != len(names):
        raise RewardError(f"reward.weights has {len(weights)} entries for {len(names)} rewards: {weights} for {names}")
    if not all(math.isfinite(weight) for weight in weights) or not any(weights):
        raise RewardError(f"reward.weights must be finite and not all zero, got {weights}")
    if len(set(names)) != len(names):
        raise RewardError(f"reward.functions has a name twice, and results are reported by name: {names}")
    if not 0 <= max_failure_ratio <= 1:
        raise RewardError(f"reward.max_failure_ratio is a share of rows from 0 to 1, got {max_failure_ratio}")


class RewardSet:
    """Several rewards with weights; `score(samples)` adds them up.

    A reward stops the run with RewardError when more than `max_failure_ratio` of its latest rows failed, or none has a
    score (`reward.failures.Failures`). A text that a healthy worker cannot score within its limits is no failure: it
    has no score, or 0.0 with `on_limit="zero"`, for which it is asked twice, as a stalled machine must not become a 0.
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

    @classmethod
    def from_config(cls, config: RewardConfig) -> RewardSet:
        """Load and combine what the configuration names."""
        from reward.loading import load_reward

        loaded: list[Reward] = []
        try:
            for spec in config.functions:
                loaded.append(load_reward(spec, config))
            return cls(loaded, config.weights, config.max_failure_ratio, config.on_limit)
        except BaseException:
            _close(loaded)
            raise

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Score one batch. Raises RewardError when a reward is broken rather than one sample bad (see the class)."""
        samples = list(samples)
        result = RewardResult([0.0] * len(samples), {}, {}, {}, {}, {}, {}, {}, {})
        for name in self.rewards:
            start = time.perf_counter()
            outcomes, result.reused[name] = self._outcomes(name, samples)
            result.seconds[name] = time.perf_counter() - start
            self._record(result, name, samples, outcomes)
        return result

    def _outcomes(self, name: str, samples: list[Sample]) -> tuple[list[Outcome], int]:
        memo = self._memos.get(name)
        if memo is not None:
            return memo.outcomes(samples, lambda new: self._ask(name, new))
        return self._ask(name, samples) if samples else [], 0

    def _ask(self, name: str, samples: list[Sample]) -> list[Outcome]:
        outcomes = checked_outcomes(self.rewards[name], samples)
        over = [i for i, outcome in enumerate(outcomes) if self.on_limit == "zero" and of_text(outcome)]
        if over:
            again = checked_outcomes(self.rewards[name], [samples[i] for i in over])
            for i, outcome in zip(over, again, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _record(self, result: RewardResult, name: str, samples: list[Sample], outcomes: list[Outcome]) -> None:
        lost = [i for i, outcome in enumerate(outcomes) if not isinstance(outcome, float)]
        kinds = [kind(outcomes[i]) for i in lost]
        result.timeouts[name] = kinds.count("timeout")
        result.errors[name] = kinds.count("error")
        result.missing[name] = kinds.count("missing")
        result.over_limit[name] = sum(map(of_text, outcomes))
        if lost:
            result.first_failure[name] = describe(samples[lost[0]], outcomes[lost[0]])
        part = [self._value(outcome) for outcome in outcomes]
        result.parts[name] = part
        weight = self.weights[name]
        for i, value in enumerate(part):
            if weight and result.total[i] is not None:
                result.total[i] = None if value is None else result.total[i] + weight * value
        self._judge(name, samples, [0.0 if value is not None else o for value, o in zip(part, outcomes, strict=True)])

    def _value(self, outcome: Outcome) -> float | None:
        if self.on_limit == "zero" and of_text(outcome):
            return 0.0
        return outcome if isinstance(outcome, float) else None

    def _judge(self, name: str, samples: list[Sample], outcomes: list[Outcome]) -> None:
        self._failures[name].add(samples, outcomes)
        if broken := self._failures[name].broken():
            count, first = broken
            self._failures[name] = Failures(self.max_failure_ratio)
            raise RewardError(
                f"reward {name!r} gave no score for {count}, more than reward.max_failure_ratio="
                f"{self.max_failure_ratio:g} allows; rows without a score are masked, so training would go on with "
                f"little data. First failure, {first}"
            )

    def close(self) -> None:
        _close(list(self.rewards.values()))


def _close(rewards: Sequence[Reward]) -> None:
    for reward in rewards:
        close = getattr(reward, "close", None)
        if close is not None:
            close()
