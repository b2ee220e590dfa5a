"""DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476, eq. 11).

A group whose responses are all right or all wrong has no learning signal, so the group of another prompt replaces it.
A round samples as many prompts as there are groups to replace, divided by the share of groups so far that had variance,
and at most as many as the step has. The overlong penalty does not count, as it varies with a response's length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from specrl.rollout.reduction import Metric, shared
from specrl.trainers.scored import Scored

LEAST_SHARE = 1 / 4
"""Lower bound on the share of prompts whose groups have variance, as estimated for the size of the next round."""


def uniform(rewards: Sequence[float | None]) -> bool:
    """Whether all rewards of a group are equal. Failed ones (None) are ignored, as they are in the group's mean."""
    known = [reward for reward in rewards if reward is not None]
    return not known or min(known) == max(known)


@dataclass(frozen=True)
class Refill:
    """Dynamic sampling of a step over all processes of a run."""

    rounds: int
    """Maximum rounds of further prompts."""
    group_size: int
    dataset: Sequence[dict]
    """The rows from which further prompts are sampled."""
    accelerator: Accelerator
    roll_out: Callable[[list[dict], int], Scored]
    """(this process's dataset rows, index of the first one among the rows of all processes) -> their rollout."""

    def __call__(self, step: Scored, seed: int) -> tuple[Scored, Scored, dict[str, Metric]]:
        """Rolls out further prompts until every uniform group is replaced, or the rounds or prompts are used up.

        Args:
            step: this process's share of the step; the rows of a group are adjacent over all processes.
            seed: of the order in which prompts are sampled, equal in all processes.

        Returns:
            All rows that this process rolled out, its rows of the step after replacement, and metrics.
        """
        size = self.group_size
        columns = zip((row.example_id for row in step.rows), step.rewards, step.unpenalised_rewards, strict=True)
        ids, rewards, unpenalised = zip(*gather_object(list(columns)), strict=True)
        groups = [unpenalised[i : i + size] for i in range(0, len(ids), size)]
        zero_variance = [i for i, group in enumerate(groups) if uniform(group)]
        rollouts, further, replacements = self._sample(len(groups), len(zero_variance), self._prompts(set(ids), seed))
        replaced_by = dict(zip(zero_variance, replacements, strict=False))
        known = [reward for reward in rewards if reward is not None]
        metrics = {
            "reward": shared(sum(known) / len(known) if known else math.nan),
            "refill/uniform_ratio": shared(len(zero_variance) / len(groups)),
            "refill/rounds": shared(len(rollouts)),
            "refill/prompts": shared(sum(len(part.rows) for part in further) // size),
            "refill/left_ratio": shared((len(zero_variance) - len(replaced_by)) / len(groups)),
        }
        return sum(rollouts, step), sum(further, step).select(self._chosen(len(step.rows), replaced_by)), metrics

    def _prompts(self, sampled_ids: set[str], seed: int) -> Iterator[int]:
        """Yields the dataset indices of prompts that are not in the step, in random order."""
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(seed)).tolist()
        return (index for index in order if self.dataset[index]["example_id"] not in sampled_ids)

    def _sample(
        self, groups: int, missing: int, prompts: Iterator[int]
    ) -> tuple[list[Scored], list[Scored], list[int]]:
        """Rolls out groups until `missing` of them have variance.

        Args: groups: of the step.

        Returns: this process's rollouts of each round, those of all processes, and the new groups with variance,
            numbered over all rounds.
        """
        rollouts: list[Scored] = []
        further: list[Scored] = []
        replacements: list[int] = []
        tried = 0
        while len(replacements) < missing and len(rollouts) < self.rounds:
            share = max((groups - missing + len(replacements)) / (groups + tried), LEAST_SHARE)
            indices = list(islice(prompts, min(math.ceil((missing - len(replacements)) / share), groups)))
            if not indices:
                break
            rollouts.append(self._roll_out_groups(indices))
            parts = gather_object([rollouts[-1]])
            further += parts
            rewards = [reward for part in parts for reward in part.unpenalised_rewards]
            for i in range(len(indices)):
                if not uniform(rewards[i * self.group_size : (i + 1) * self.group_size]):
                    replacements.append(tried + i)
            tried += len(indices)
        return rollouts, further, replacements

    def _roll_out_groups(self, indices: list[int]) -> Scored:
        """This process's share of the rows of a group of each dataset row."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        rows = [index for index in indices for _ in range(self.group_size)]
        begin = len(rows) * rank // world
        end = len(rows) * (rank + 1) // world
        return self.roll_out([self.dataset[index] for index in rows[begin:end]], begin)

    def _chosen(self, rows: int, replaced_by: dict[int, int]) -> list[int]:
        """This process's rows after replacement, as indices into its `rows` rows followed by all new ones."""
        first = self.accelerator.process_index * rows
        chosen = []
        for index in range(rows):
            group, sample_index = divmod(first + index, self.group_size)
            if group in replaced_by:
                chosen.append(rows + replaced_by[group] * self.group_size + sample_index)
            else:
                chosen.append(index)
        return chosen
