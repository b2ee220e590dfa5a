"""The meaning of `auto` in each algorithm."""

import pytest

from specrl.trainers.config import TrainerConfig


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
def test_dapo_refills_zero_variance_groups_and_punishes_overlong_text_by_default(options, rounds, overlong):
    config = TrainerConfig(**options)
    assert (config.refill_rounds, config.overlong_tokens(200)) == (rounds, overlong)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0.2, 0.2)),
        ({"clip_high": 0.3}, (0.2, 0.3)),
        ({"clip": 0.1}, (0.1, 0.1)),
        ({"algorithm": "dapo"}, (0.2, 0.28)),
        ({"algorithm": "dapo", "clip": 0.1}, (0.1, 0.28)),
        ({"ratio": "sequence"}, (3e-4, 4e-4)),
        ({"ratio": "sequence", "algorithm": "dapo"}, (3e-4, 4e-4)),
        ({"ratio": "sequence", "clip_high": 1e-3}, (3e-4, 1e-3)),
        ({"ratio": "sequence", "clip": 0.01}, (0.01, 0.01)),
        ({"ratio": "sequence", "algorithm": "dapo", "clip": 0.01}, (0.01, 0.01)),
    ],
)
def test_the_clip_range_fits_what_is_clipped(options, expected):
    assert TrainerConfig(**options).clip_range == expected
