"""What the rollouts of a trainer need from the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specrl.rollout.config import RolloutConfig
from specrl.rollout.reduction import Metric
from specrl.rollout.speculative import SpeculativeRollout
from specrl.trainers.config import TrainerConfig
from specrl.trainers.conversations import Tools
from specrl.trainers.keeping import Keeping

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Score = Callable[[Sequence[dict], Sequence[list]], tuple[list[float | None], dict[str, Metric]]]
"""(dataset rows, responses) -> total reward of each row, None where it failed, and metrics to log.

A response is a list of token ids, or with tools the list of messages that followed the prompt.
"""


@dataclass(frozen=True)
class Setup:
    """What the rollouts of a trainer need from the run."""

    score: Score
    render: Callable[[dict], list[int]]
    """Renders the prompt of a dataset row as token ids."""
    dataset: Sequence[dict]
    """The training rows. The prompt of the first one is the probe that engine and trainer must score equally."""
    make_rollout: Callable[[PreTrainedModel], SpeculativeRollout]
    """Builds the source of responses from the policy as it is trained (adapters included)."""
    rollout: RolloutConfig
    trainer: TrainerConfig
    keeping: Keeping = field(default_factory=Keeping)
    """Keeps the responses besides the cache."""
    tools: Tools | None = None
    """What the policy may call; None without tools."""
    max_turns: int = 1
    """Responses of a conversation with tools."""
