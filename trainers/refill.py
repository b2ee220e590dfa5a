"""DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476, eq. 11).

A group whose responses are all right or all wrong has no learning signal, so the group of another prompt replaces it.
Rewards are compared without the overlong penalty, because the penalty varies with the length of a response.
"""

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
"""Lower bound on the share of prompts whose groups have variance, as estimated for the size of the next round."""


def uniform(rewards: Sequence[float | None]) -> bool:
    """Whether all rewards of a group are equal. Failed ones (None) are ignored, as they are in the group's mean."""
    known = [reward for reward in rewards if reward is not None]
    return not known or min(known) == max(known)


def refill(
    rewards: Sequence[float | None],
    group_size: int,
    prompts: Iterator[int],
    roll_out: Callable[[list[int]], Sequence[float | None]],
    rounds: int,
) -> tuple[dict[int, int], dict[str, Metric]]:
    """Rolls out further prompts until every uniform group is replaced, or the rounds or prompts are used up.

    The number of prompts of a round is the number of groups still to be replaced, divided by the share of this step's
    groups so far that had variance. It is at most the number of prompts of the step.

    Args:
        rewards: rewards of all rows of the step without the overlong penalty; the rows of a group are adjacent.
        prompts: dataset indices of further prompts, none of which is in the step.
        roll_out: returns the rewards of one group for each dataset index.
        rounds: maximum number of calls of `roll_out`.

    Returns:
        {index of a uniform group: index of the new group that replaces it}, and metrics. New groups are numbered from 0
        over all rounds.
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
    """Dynamic sampling of a step over all processes of a run."""

    rounds: int
    """Maximum rounds of further prompts."""
    group_size: int
    exchange: Callable[[list], list]
    """Concatenates the lists of all processes; collective."""
    roll_out: Callable[[list[dict], int], Scored]
    """(this process's dataset rows, index of the first one among the rows of all processes) -> their rollout."""

    def __call__(
        self, got: Scored, accelerator: Accelerator, dataset: Sequence[dict], order: int
    ) -> tuple[Scored, Scored, dict[str, Metric]]:
        """Returns all rows that this process rolled out, its rows of the step after replacement, and metrics.

        Args:
            got: this process's share of the step.
            dataset: the rows from which further prompts are sampled.
            order: seed of the sampling, equal in all processes.
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
