"""DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476, eq. 11): groups that are all right or all wrong teach
nothing about being right, so further prompts take their places. They are known by their rewards before the overlong
penalty, by which texts that differ in length alone would differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from accelerate import Accelerator

from specrl.rollout.reduction import Metric, shared
from specrl.trainers.scored import Scored

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
) -> tuple[dict[int, int], dict[str, Metric]]:
    """Rolls out further prompts until no group is uniform, or the rounds or prompts are used up.

    A round asks for as many prompts as are missing over the share of prompts that had variance so far in this step, at
    most for as many as the step has.

    Args:
        rewards: of all rows of the step, without the overlong penalty, groups side by side.
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
        "refill/uniform_ratio": shared(begun / len(groups)),
        "refill/rounds": shared(done),
        "refill/prompts": shared(asked),
        "refill/left_ratio": shared((begun - len(places)) / len(groups)),
    }


@dataclass(frozen=True)
class Refill:
    """Dynamic sampling of a step, in all processes of a run at once."""

    rounds: int
    """In which further prompts are asked for, at most."""
    group_size: int
    exchange: Callable[[list], list]
    """Turns a list of this process into that of all processes; collective."""
    roll_out: Callable[[list[dict], int], Scored]
    """Of this process's share of some dataset rows, given the place of its first among those of all processes."""

    def __call__(
        self, got: Scored, accelerator: Accelerator, dataset: Sequence[dict], order: int
    ) -> tuple[Scored, Scored, dict[str, Metric]]:
        """All that was rolled out, the rows of the step with those of uniform groups replaced, and metrics.

        Args:
            got: this process's share of the step.
            dataset: where further prompts are from.
            order: seed of their order, the same in all processes.
        """
        world, rank, size = accelerator.num_processes, accelerator.process_index, self.group_size
        ids = [row.example_id for row in got.rows]
        names, rewards, earned = zip(*self.exchange([*zip(ids, got.rewards, got.earned, strict=True)]), strict=True)
        taken = set(names)
        rolled, further = got, []

        def roll_out(indices: list[int]) -> list[float | None]:
            nonlocal rolled
            rows = [index for index in indices for _ in range(size)]
            begin, end = (len(rows) * i // world for i in (rank, rank + 1))
            own = self.roll_out([dataset[index] for index in rows[begin:end]], begin)
            rolled = rolled + own
            further.extend(self.exchange([own]))
            return [reward for part in further[-world:] for reward in part.earned]

        drawn = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(order)).tolist()
        others = (index for index in drawn if dataset[index]["example_id"] not in taken)
        places, metrics = refill(earned, size, others, roll_out, self.rounds)
        known = [reward for reward in rewards if reward is not None]
        metrics["reward"] = shared(sum(known) / len(known) if known else math.nan)
        whole, chosen, first = sum(further, got), [], rank * len(got.rows)
        for place in range(first, first + len(got.rows)):
            group, sample_index = divmod(place, size)
            chosen.append(len(got.rows) + places[group] * size + sample_index if group in places else place - first)
        return rolled, whole.select(chosen), metrics
