import re

import pytest

from specrl.run.tasks import RULES, arithmetic, split_of

LEVELS = (*RULES, "mixed")

CALCULATION = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")
APPLY = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def test_same_arguments_same_problems():
    assert arithmetic("train", 50, seed=3) == arithmetic("train", 50, seed=3)
    assert arithmetic("train", 50, seed=3) != arithmetic("train", 50, seed=4)


def test_text_is_the_same_in_every_version():
    """Guards stored trajectories and published numbers: they name problems by id only."""
    first = arithmetic("train", 1)[0]
    assert first.id == "arithmetic/train/mixed/0/0"
    assert first.prompt == "Leo has 74 pens. He donates 47, collects 18, drops 17. How many pens does Leo have now?\n"
    assert first.answer == "28"


@pytest.mark.parametrize("level", LEVELS)
def test_splits_are_disjoint_for_every_seed(level):
    train = {p.prompt for seed in range(3) for p in arithmetic("train", 1000, seed, level)}
    test = {p.prompt for seed in range(3) for p in arithmetic("test", 300, seed, level)}
    assert not train & test
    assert {split_of(prompt) for prompt in train} == {"train"}
    assert {split_of(prompt) for prompt in test} == {"test"}


@pytest.mark.parametrize("level", LEVELS)
def test_every_solution_is_right(level):
    for problem in arithmetic("train", 400, level=level):
        *lines, last = problem.solution.split("\n")
        total = int(re.search(r"has (\d+)", problem.prompt)[1])
        events = re.search(r"(?:He|She) (.*?)\. How", problem.prompt)[1].split(", ")
        assert len(lines) == len(events)
        for line, event in zip(lines, events, strict=True):
            assert line.split(" ", 1)[1].startswith(event + ": ")
            calculations = CALCULATION.findall(line)
            assert all(APPLY[sign](int(a), int(b)) == int(c) for a, sign, b, c in calculations)
            assert int(calculations[-1][0]) == total
            total = int(calculations[-1][3])
            assert 0 <= total <= (99_999 if level == "large" else 999)
        assert last == f"#### {problem.answer}" == f"#### {total}"
