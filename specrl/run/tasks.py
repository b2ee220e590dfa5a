"""Generated multi-step arithmetic word problems: a task with a checkable answer that needs no download.

A problem is a pure function of (seed, split, level, index): it is the same on every machine and in every process, and
asking for more problems never changes the ones already seen. The splits are disjoint for all seeds and levels by
construction: the text of a problem decides its split, and a draw that belongs to the other split is drawn again.
"""

import random
import zlib
from dataclasses import dataclass
from difflib import get_close_matches

SPLITS = ("train", "test")
LEVELS = ("easy", "medium", "hard", "mixed")
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
    """One problem. `solution` ends with "#### " + `answer`; `answer` is a whole number in decimal digits."""

    id: str
    prompt: str
    solution: str
    answer: str


@dataclass(frozen=True)
class Level:
    """Limits of a difficulty, inclusive: number of steps, start, amount of a step, largest total; share of packs."""

    steps: tuple[int, int]
    start: tuple[int, int]
    amount: tuple[int, int]
    largest: int
    packs: float


RULES = {
    "easy": Level(steps=(3, 4), start=(20, 79), amount=(10, 49), largest=199, packs=0.0),
    "medium": Level(steps=(4, 7), start=(30, 149), amount=(10, 99), largest=399, packs=0.0),
    "hard": Level(steps=(6, 9), start=(100, 399), amount=(10, 199), largest=999, packs=0.25),
}


def arithmetic(split: str, size: int, seed: int = 0, level: str = "mixed") -> list[Problem]:
    """The first `size` problems of a split, in a fixed order.

    Args:
        split: "train" or "test"; no prompt occurs in both.
        size: number of problems, at least 0.
        seed: another seed gives other problems of the same split.
        level: "easy", "medium", "hard", or "mixed" (shares in `MIX`).

    Raises:
        ValueError: unknown split or level, or a negative size.
    """
    _check("split", split, SPLITS)
    _check("level", level, LEVELS)
    if size < 0:
        raise ValueError(f"arithmetic: size must be 0 or more, got {size}; the nearest allowed size is 0.")
    return [_problem(split, index, seed, level) for index in range(size)]


def split_of(prompt: str) -> str:
    """The split a prompt belongs to, decided by a checksum of its text."""
    return "test" if zlib.crc32(prompt.encode()) % TEST_SHARE == 0 else "train"


def _problem(split: str, index: int, seed: int, level: str) -> Problem:
    name = f"arithmetic/{split}/{level}/{seed}/{index}"
    rng = random.Random(name)
    drawn = rng.choices(list(MIX), weights=list(MIX.values()))[0] if level == "mixed" else level
    while True:
        prompt, solution, total = _story(rng, RULES[drawn])
        if split_of(prompt) == split:
            return Problem(id=name, prompt=prompt, solution=solution, answer=str(total))


def _story(rng: random.Random, rule: Level) -> tuple[str, str, int]:
    """Prompt, solution and final total of one story."""
    name, item = rng.choice(list(PEOPLE)), rng.choice(ITEMS)
    total = rng.randint(*rule.start)
    told, worked = [], []
    opening = f"{name} has {total} {item}."
    for _ in range(rng.randint(*rule.steps)):
        event, line, total = _step(rng, rule, total)
        told.append(event)
        worked.append(f"{PEOPLE[name]} {event}: {line}\n")
    prompt = f"{opening} {PEOPLE[name]} {', '.join(told)}. How many {item} does {name} have now?\n"
    return prompt, "".join(worked) + f"#### {total}", total


def _step(rng: random.Random, rule: Level, total: int) -> tuple[str, str, int]:
    """One event as told ("buys 57"), as worked ("34 + 57 = 91"), and the new total, kept within 0 and the largest."""
    amount, packed = rng.randint(*rule.amount), ""
    counted = f"{amount}"
    if rng.random() < rule.packs:
        packs, each = rng.randint(2, 9), rng.randint(3, 9)
        amount = packs * each
        counted = f"{packs} {rng.choice(PACKS)} of {each}"
        packed = f"{packs} * {each} = {amount}, "
    gain = total < amount or (total + amount <= rule.largest and rng.random() < 0.5)
    after = total + amount if gain else total - amount
    verb, sign = (rng.choice(GAINS), "+") if gain else (rng.choice(LOSSES), "-")
    return f"{verb} {counted}", f"{packed}{total} {sign} {amount} = {after}", after


def _check(what: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        near = get_close_matches(str(given), allowed, n=1, cutoff=0.0)[0]
        raise ValueError(f"arithmetic: unknown {what} {given!r}; known: {', '.join(allowed)}. Did you mean {near!r}?")
