"""The format reward: which completions end in an answer."""

import pytest

from specrl.reward.base import Sample
from specrl.reward.format import FormatReward, well_formed


@pytest.mark.parametrize(
    "completion",
    [
        "thus\n#### 18",
        "#### -1,234.50\n\n",
        "#### $18.",
        r"so \boxed{18}.",
        "\\[\n\\boxed{\\frac{1}{2}}\n\\]",
        r"the answer is \boxed{x} dollars" + " a day" * 10,
    ],
)
def test_well_formed(completion):
    assert well_formed(completion)


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "18",
        "####",
        "#### eighteen",
        "#### 18\nand more",
        "the end #### 18",
        "##### 18",
        r"\boxed{}",
        r"\boxed{18",
        r"\boxed{18}" + "x" * 101,
    ],
)
def test_not_well_formed(completion):
    assert not well_formed(completion)


def test_thoughts_do_not_count_and_neither_does_correctness():
    thought = Sample("p", r"<think>so \boxed{18}", "18")
    answered = Sample("p", r"<think>so 18</think>\boxed{18}", "18")
    samples = [thought, answered, Sample("p", "#### 18", "20"), Sample("p", "eighteen", None)]
    assert FormatReward()(samples) == [0.0, 1.0, 1.0, 0.0]
