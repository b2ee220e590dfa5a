"""What `auto` stands for in each algorithm."""

import pytest

from trainers.config import TrainerConfig


@pytest.mark.parametrize(
    ("options", "rounds", "overlong"),
    [
        ({"algorithm": "grpo"}, 0, 0),
        ({"algorithm": "ppo"}, 0, 0),
        ({"algorithm": "dapo"}, 10, 40),
        ({"algorithm": "dapo", "refills": 0, "overlong_buffer": 0}, 0, 0),
        ({"algorithm": "grpo", "refills": 3, "overlong_buffer": 16}, 3, 16),
    ],
)
def test_dapo_replaces_dull_groups_and_punishes_overlong_text_unless_told_otherwise(options, rounds, overlong):
    config = TrainerConfig(**options)
    assert (config.refill_rounds, config.overlong_tokens(200)) == (rounds, overlong)
