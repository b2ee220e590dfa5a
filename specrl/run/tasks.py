"""Generated multi-step arithmetic word problems with checkable answers, which need no download.

A problem is a pure function of (seed, split, level, index), so it is the same on every machine and in every process,
and a larger size only appends problems. The splits are disjoint for all seeds and levels, because a checksum of a
problem's text decides its split: the generator discards problems until one belongs to the requested split.
"""

import random
import zlib
from dataclasses import dataclass
from typing import Literal

MIX = {"easy": 0.40, "medium": 0.40, "hard": 0.20}
TEST_SHARE = 8  # one text in eight belongs to the test split

PEOPLE = dict.fromkeys(("Tom", "Ben", "Sam", "Max", "Leo", "Dan"), "He")
PEOPLE |= dict.fromkeys(("Ann", "Eva", "Mia", "Zoe", "Amy", "Kim"), "She")
ITEMS = ("apples", "books", "coins", "cards", "shells", "stamps", "pens", "beads", "marbles", "nuts")
GAINS = ("buys", "finds", "wins", "gets", "makes", "collects")
LOSSES = ("sells", "loses", "lends", "drops", "donates", "gives away")
PACKS = ("bags", "boxes", "packs")


@dataclass(frozen=True)
class Problem:
    """One problem. `answer` is a non-negative decimal integer, and `solution` ends with "#### " + `answer`."""

    id: str
    prompt: str
    solution: str
    answer: str


@dataclass(frozen=True)
class Level:
    """Inclusive limits of a difficulty level. `packs` is the share of steps that count items in packs."""

    steps: tuple[int, int]
    start: tuple[int, int]
    amount: tuple[int, int]
    largest: int
    packs: float


RULES = {
    "single": Level(steps=(1, 1), start=(2, 20), amount=(1, 9), largest=29, packs=0.0),
    "easy": Level(steps=(3, 4), start=(20, 79), amount=(10, 49), largest=199, packs=0.0),
    "medium": Level(steps=(4, 7), start=(30, 149), amount=(10, 99), largest=399, packs=0.0),
    "hard": Level(steps=(6, 9), start=(100, 399), amount=(10, 199), largest=999, packs=0.25),
    "large": Level(steps=(2, 4), start=(1000, 9999), amount=(100, 9999), largest=99_999, packs=0.0),
}

GENERATED = {"arithmetic": "mixed", **{f"arithmetic:{level}": level for level in RULES}}
"""The level of each name that `data` may have."""


def arithmetic(split: Literal["train", "test"], size: int, seed: int = 0, level: str = "mixed") -> list[Problem]:
    """The first `size` problems of a split, in a fixed order.

    Args:
        split: "train" or "test"; no prompt occurs in both.
        size: number of problems.
        seed: different seeds give different problems.
        level: "single" (one step), "easy", "medium", "hard", "mixed" (shares in `MIX`), or "large" (numbers for a
            calculator).
    """
    return [_problem(split, index, seed, level) for index in range(size)]


def split_of(prompt: str) -> str:
    """The split that a prompt belongs to, by a checksum of its text."""
    return "test" if zlib.crc32(prompt.encode()) % TEST_SHARE == 0 else "train"


def _problem(split: str, index: int, seed: int, level: str) -> Problem:
    name = f"arithmetic/{split}/{level}/{seed}/{index}"
    rng = random.Random(name)
    chosen = rng.choices(list(MIX), weights=list(MIX.values()))[0] if level == "mixed" else level
    while True:
        prompt, solution, total = _story(rng, RULES[chosen])
        if split_of(prompt) == split:
            return Problem(id=name, prompt=prompt, solution=solution, answer=str(total))


def _story(rng: random.Random, rule: Level) -> tuple[str, str, int]:
    """Prompt, solution and final total of one story."""
    name = rng.choice(list(PEOPLE))
    item = rng.choice(ITEMS)
    total = rng.randint(*rule.start)
    events = []
    calculations = []
    opening = f"{name} has {total} {item}."
    for _ in range(rng.randint(*rule.steps)):
        event, line, total = _step(rng, rule, total)
        events.append(event)
        calculations.append(f"{PEOPLE[name]} {event}: {line}\n")
    prompt = f"{opening} {PEOPLE[name]} {', '.join(events)}. How many {item} does {name} have now?\n"
    return prompt, "".join(calculations) + f"#### {total}", total


def _step(rng: random.Random, rule: Level, total: int) -> tuple[str, str, int]:
    """One event: its text ("buys 57"), its calculation ("34 + 57 = 91"), and the new total in 0..`rule.largest`."""
    amount = rng.randint(*rule.amount)
    packed = ""
    counted = f"{amount}"
    if rng.random() < rule.packs:
        packs = rng.randint(2, 9)
        each = rng.randint(3, 9)
        amount = packs * each
        counted = f"{packs} {rng.choice(PACKS)} of {each}"
        packed = f"{packs} * {each} = {amount}, "
    gain = total < amount or (total + amount <= rule.largest and rng.random() < 0.5)
    after = total + amount if gain else total - amount
    verb, sign = (rng.choice(GAINS), "+") if gain else (rng.choice(LOSSES), "-")
    return f"{verb} {counted}", f"{packed}{total} {sign} {amount} = {after}", after
