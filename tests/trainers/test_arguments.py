"""Rows per process and pass: valid combinations, and the suggested value for an invalid one."""

import pytest

from specrl.rollout.config import RolloutConfig
from specrl.rollout.types import RolloutError
from specrl.trainers.arguments import passes
from specrl.trainers.config import TrainerConfig


def split(prompts, group, per_pass, world):
    return passes(
        TrainerConfig(prompts_per_step=prompts, rows_per_pass=per_pass), RolloutConfig(group_size=group), world
    )


@pytest.mark.parametrize(("given", "found"), [((4, 8, 0, 1), (32, 1)), ((4, 8, 0, 2), (16, 1)), ((4, 8, 4, 2), (4, 4))])
def test_rows_fill_the_passes_of_every_process(given, found):
    assert split(*given) == found


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ((4, 8, 10, 2), "Use trainer.rows_per_pass=8, or another trainer.prompts_per_step"),
        ((4, 8, 32, 2), "Use trainer.rows_per_pass=16, or another trainer.prompts_per_step"),
        ((4, 8, 0, 3), "Use a number of processes that divides 32, or another trainer.prompts_per_step"),
    ],
)
def test_what_does_not_fit_is_told_with_what_does(given, remedy):
    with pytest.raises(RolloutError) as caught:
        split(*given)
    assert str(caught.value).startswith(f"32 rows per step cannot be split over {given[3]} processes of ")
    assert str(caught.value).endswith(remedy)
