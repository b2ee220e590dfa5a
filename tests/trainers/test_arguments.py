"""Rows per process and pass: valid combinations, and the suggested value for an invalid one."""

import pytest

from specrl.rollout.config import RolloutConfig
from specrl.rollout.types import RolloutError
from specrl.trainers.config import TrainerConfig
from specrl.trainers.grpo.arguments import passes


def split(prompts, group, per_pass, world, minibatches=1):
    options = TrainerConfig(prompts_per_step=prompts, rows_per_pass=per_pass, minibatches=minibatches)
    return passes(options, RolloutConfig(group_size=group), world)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ((4, 8, 10, 2), "Use trainer.rows_per_pass=8"),
        ((4, 8, 32, 2), "Use trainer.rows_per_pass=16"),
        ((4, 8, 0, 3), "Use a number of processes that divides 32"),
    ],
)
def test_rows_that_cannot_be_split_are_refused(options, remedy):
    with pytest.raises(RolloutError, match=f"32 rows .* {options[3]} processes .*{remedy}"):
        split(*options)
