"""DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476, eq. 11): groups whose rewards are all alike have no
advantage and teach nothing, so further prompts take their places."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

LEAST_SHARE = 1 / 4
"""Of prompts whose groups have variance, as far as asking for replacements goes: so many more are asked for at most."""


def uniform(rewards: Sequence[float | None]) -> bool:
    """Whether a group's rewards are all alike; failed ones are left out, as they are of its mean."""
    known = [reward for reward in rewards if reward is not None]
    return not known or min(known) == max(known)


def refill(
    rewards: Sequence[float | None],
    group_size: int,
    prompts: Iterator[int],
    roll_out: Callable[[list[int]], Sequence[float | None]],
    rounds: int,
) -> tuple[dict[int, int], dict[str, float]]:
    """Rolls out further prompts until no group is uniform, or the rounds or prompts are used up.

    A round asks for as many prompts as are missing over the share of prompts that had variance so far in this step, at
    most for as many as the step has.

    Args:
        rewards: of all rows of the step, groups side by side.
        prompts: indices of further dataset rows, none of them in the step.
        roll_out: gives the rewards of the groups of some prompts, which are then numbered on behind those before.
        rounds: how often prompts are asked for at most.

    Returns: (uniform group of the step -> new group, counted over all rounds, that takes its place), and metrics.
    """
    groups = [rewards[i : i + group_size] for i in range(0, len(rewards), group_size)]
    dull = [i for i, group in enumerate(groups) if uniform(group)]
    begun, asked, done, live = len(dull), 0, 0, len(groups) - len(dull)
    places: dict[int, int] = {}
    while len(places) < begun and done < rounds:
        share = max(live / (len(groups) + asked), LEAST_SHARE)
        wanted = list(islice(prompts, min(math.ceil((begun - len(places)) / share), len(groups))))
        if not wanted:
            break
        found = roll_out(wanted)
        fresh = [i for i in range(len(wanted)) if not uniform(found[i * group_size : (i + 1) * group_size])]
        places |= dict(zip(dull[len(places) :], (asked + i for i in fresh), strict=False))
        asked, done, live = asked + len(wanted), done + 1, live + len(fresh)
    return places, {
        "refill/uniform_ratio": begun / len(groups),
        "refill/rounds": done,
        "refill/prompts": asked,
        "refill/left_ratio": (begun - len(places)) / len(groups),
    }
