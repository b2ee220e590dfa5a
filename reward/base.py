"""The interface of a reward: samples in, numbers out.

The rule of this package: an infrastructure failure never becomes a reward. A row that could not be scored is None,
which masks it from training, and it is counted; many such rows stop the run with the first failure's traceback. A text
that takes more time or memory than a healthy worker may use is not such a failure: it is masked, or 0 by option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_SCORE = 1e15  # trainers square rewards in float32 for the group's standard deviation


class RewardError(RuntimeError):
    """Rewards cannot be computed and the run should stop; the message says what to change."""


class LimitError(RuntimeError):
    """A text reached the time or memory limit of a worker.

    `caused_by_text` is set once the same workers have answered another text in time. Until then the cause may be the
    workers, the machine or a service that the reward needs.
    """

    caused_by_text = False


@dataclass(frozen=True)
class Sample:
    """One rollout, as rewards see it."""

    prompt: str  # the text that the model saw: with a chat template its whole output, special tokens included
    completion: str  # the response, decoded without special tokens
    answer: str | None = None  # the dataset's reference answer, if it has one
    fields: dict[str, Any] = field(default_factory=dict)  # the row's other dataset columns
    messages: list[dict[str, Any]] | None = None  # of a chat, each with `role` and `content`; None for plain text


Outcome = float | None | Exception


class Reward(Protocol):
    """Scores samples. A score depends on its own sample only, so a batch may be split, and rows scored again.

    A call returns one number per sample. For a sample that cannot be scored it returns None, or the exception that
    prevented it: the row is masked and counted, and never becomes 0. Optional members:

    - `close()` releases resources.
    - `check(samples)` says which rows no response could be scored for, such as a reference answer that cannot be read
      or tests that pass a program which does nothing: an exception or None a sample. It does not look at completions.
    - `deterministic = True` promises that a score depends on nothing but the sample (no time, no randomness, no judge
      that changes). RewardSet then scores each sample once and reuses the score.
    - `verifiable = True` says that the scores are correctness: 1 for right, less for anything else. pass@k uses it.
    """

    name: str

    def __call__(self, samples: Sequence[Sample], /) -> Sequence[Outcome]: ...


def attempt(function: Callable[[Any], Any], argument: Any) -> Any:
    """The function's result, or the exception that it raised. RewardError is raised: nothing can be scored."""
    try:
        return function(argument)
    except RewardError:
        raise
    except Exception as error:
        return error


def checked_outcomes(reward: Reward, samples: Sequence[Sample]) -> list[Outcome]:
    """One float, None or exception per sample. RewardError is raised: it means that nothing can be scored.

    When the call raises or returns the wrong number of scores, it is repeated sample by sample, so that one bad sample
    costs only its own score.
    """
    scores = attempt(lambda batch: _checked_length(reward(batch), batch), samples)
    if isinstance(scores, Exception):
        if len(samples) == 1:
            return [scores]
        return [checked_outcomes(reward, [sample])[0] for sample in samples]
    return [attempt(_checked_score, score) for score in scores]


def _checked_length(scores: Any, samples: Sequence[Sample]) -> Sequence[Any]:
    """The scores if there is one per sample; raises TypeError or ValueError."""
    if isinstance(scores, (str, bytes, Mapping, set, frozenset)) or not hasattr(scores, "__len__"):
        raise TypeError(f"a reward must return a list of scores, got {type(scores).__name__} {scores!r:.80}")
    if len(scores) != len(samples):
        raise ValueError(f"a reward must return one score per sample: {len(scores)} for {len(samples)} samples")
    return scores


def _checked_score(score: Any) -> Outcome:
    """The score as a finite float; None and exceptions are returned as they are. Raises TypeError or ValueError."""
    if score is None or isinstance(score, Exception):
        return score
    if not hasattr(score, "__float__"):  # float() would also accept text
        raise TypeError(f"a score must be a number or None, got {type(score).__name__} {score!r:.80}")
    number = float(score)
    if not abs(number) <= MAX_SCORE:
        raise ValueError(f"a score must be finite and at most {MAX_SCORE:g} in size, got {number}")
    return number
