"""The format reward: 1.0 when a completion ends in a recognisable answer, right or wrong, else 0.0.

A completion ends in an answer when, after its thoughts (`reward.thinking_tags`), one of these holds:

- its last non-blank line is `#### NUMBER`: optional sign and dollar sign, thousands commas, decimals, a final period;
- a complete, non-empty `\\boxed{...}` closes within its last 100 characters.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrl.reward.answers import boxes, final_text
from specrl.reward.base import Sample
from specrl.reward.config import RewardConfig
from specrl.reward.spelling import canonical, normal_number

BOX_TAIL_CHARS = 100


class FormatReward:
    name = "format"
    deterministic = True

    def __init__(self, config: RewardConfig | None = None):
        self._tags = (config or RewardConfig()).thinking_tags

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        return [float(well_formed(final_text(s.prompt, s.completion, self._tags))) for s in samples]


def well_formed(text: str) -> bool:
    """Whether the text ends in an answer as described above."""
    text = text.rstrip()
    last_line = text.rpartition("\n")[2].strip()
    if last_line.startswith("####") and normal_number(canonical(last_line[4:])) is not None:
        return True
    found = boxes(text)
    return bool(found) and bool(found[-1][2].strip()) and found[-1][1] >= len(text) - BOX_TAIL_CHARS
