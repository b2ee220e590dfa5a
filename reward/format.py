"""The format reward: 1.0 when a completion ends in a recognisable answer, right or wrong, else 0.0.

A completion ends in an answer when one of these holds:

- its last non-blank line is `#### NUMBER`: optional sign and dollar sign, thousands commas, decimals, a final period;
- a complete, non-empty `\\boxed{...}` closes within its last 100 characters.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrl.reward.answers import last_box, normal_number
from specrl.reward.base import Sample
from specrl.reward.config import RewardConfig

BOX_TAIL_CHARS = 100


class FormatReward:
    name = "format"
    deterministic = True

    def __init__(self, config: RewardConfig | None = None):
        """Built-in rewards take the configuration; this one uses nothing of it."""

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        return [float(well_formed(sample.completion)) for sample in samples]


def well_formed(completion: str) -> bool:
    """Whether the completion ends in an answer as described above."""
    text = completion.rstrip()
    last_line = text[text.rfind("\n") + 1 :].strip()
    if last_line.startswith("####") and normal_number(last_line[4:].strip().rstrip(".")) is not None:
        return True
    box = last_box(text)
    return box is not None and bool(box[2].strip()) and box[1] >= len(text) - BOX_TAIL_CHARS
