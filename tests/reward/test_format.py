"""The format reward: which completions end in an answer."""

import pytest

from specrl.reward.base import Sample
from specrl.reward.format import FormatReward, well_formed

WELL_FORMED = (
    *("thus\n#### 18", "#### -1,234.50\n\n", "#### $18.", r"so \boxed{18}.", "\\[\n\\boxed{\\frac{1}{2}}\n\\]"),
    r"the answer is \boxed{x} dollars" + " a day" * 10,
)
NOT_WELL_FORMED = (
    *("", "18", "####", "#### eighteen", "#### 18\nand more", "the end #### 18", "##### 18", r"\boxed{}", r"\boxed{18"),
    r"\boxed{18}" + "x" * 101,
)


@pytest.mark.parametrize("completion", [*WELL_FORMED, *NOT_WELL_FORMED])
def test_which_completions_end_in_an_answer(completion):
    assert well_formed(completion) == (completion in WELL_FORMED)


def test_thoughts_do_not_count_and_neither_does_correctness():
    thought = Sample("p", r"<think>so \boxed{18}", "18")
    answered = Sample("p", r"<think>so 18</think>\boxed{18}", "18")
    samples = [thought, answered, Sample("p", "#### 18", "20"), Sample("p", "eighteen", None)]
    assert FormatReward()(samples) == [0.0, 1.0, 1.0, 0.0]
