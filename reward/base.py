"""What a reward is: text in, number out.

The rule of this package: an infrastructure failure never becomes a reward. A row that could not be scored is None,
which masks it from training, and it is counted; many such rows stop the run with the first failure's traceback. A text
that takes more time or memory than a healthy worker may use is not such a failure: it is masked, or 0 by option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

LARGEST = 1e15  # trainers square rewards in float32 for the group's standard deviation


class RewardError(RuntimeError):
    """Rewards cannot be computed and the run should stop; the message says what to change."""


class LimitError(RuntimeError):
    """A text reached the time or memory limit of a worker.

    `of_text` says that the same workers answered another text in time afterwards: it was this text's own doing. Until
    then it may be the workers, the machine or what the reward asks.
    """

    of_text = False


@dataclass(frozen=True)
class Sample:
    """What a reward sees of one rollout."""

    prompt: str  # the text that the model saw: with a chat template its whole output, special tokens included
    completion: str  # the response, decoded without special tokens
    answer: str | None = None  # the dataset's reference answer, if it has one
    fields: dict[str, Any] = field(default_factory=dict)  # the row's other dataset columns
    messages: list[dict[str, Any]] | None = None  # of a chat, each with `role` and `content`; None for plain text


Outcome = float | None | Exception


class Reward(Protocol):
    """Scores samples. Each score depends on its own sample only, so a batch may be cut or repeated row by row.

    Returns one number per sample; for one that cannot be scored None, or the exception that prevented it (the row is
    masked and counted, never 0). An optional method: `close()` releases resources. An optional attribute:
    `deterministic = True` promises that a score depends on nothing but the sample (no time, no randomness, no judge
    that changes); RewardSet then asks once for each sample, not every time it comes. Another: `verifiable = True` says
    that its scores are correctness, 1 for right and less for anything else; pass@k is counted from it.
    """

    name: str

    def __call__(self, samples: Sequence[Sample]) -> Sequence[Outcome]: ...


def attempt(function: Callable[[Any], Any], argument: Any) -> Any:
    """What the function returns, or the exception that it raised. RewardError passes: nothing can be scored."""
    try:
        return function(argument)
    except RewardError:
        raise
    except Exception as error:
        return error


def _number(value: Any) -> Outcome:
    """A reward's return value as a finite float; None and exceptions pass, anything else is raised on."""
    if value is None or isinstance(value, Exception):
        return value
    if not hasattr(value, "__float__"):  # text has none, though float() would read it
        raise TypeError(f"a score must be a number or None, got {type(value).__name__} {value!r:.80}")
    number = float(value)
    if not abs(number) <= LARGEST:
        raise ValueError(f"a score must be finite and at most {LARGEST:g} in size, got {number}")
    return number


def _listed(returned: Any, samples: Sequence[Sample]) -> Sequence[Any]:
    """One value per sample, or TypeError or ValueError."""
    if isinstance(returned, (str, bytes, Mapping, set, frozenset)) or not hasattr(returned, "__len__"):
        raise TypeError(f"a reward must return a list of scores, got {type(returned).__name__} {returned!r:.80}")
    if len(returned) != len(samples):
        raise ValueError(f"a reward must return one score per sample: {len(returned)} for {len(samples)} samples")
    return returned


def checked_outcomes(reward: Reward, samples: Sequence[Sample]) -> list[Outcome]:
    """One float, None or exception per sample. RewardError passes through: it means that nothing can be scored.

    When the whole call raises or returns the wrong number of scores, it is repeated sample by sample, so that one bad
    sample costs only its own score.
    """
    returned = attempt(lambda rows: _listed(reward(rows), rows), samples)
    if isinstance(returned, Exception):
        if len(samples) == 1:
            return [returned]
        return [checked_outcomes(reward, [sample])[0] for sample in samples]
    return [attempt(_number, value) for value in returned]
