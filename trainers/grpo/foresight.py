"""Which rows TRL will ask for next, so that they may be rolled out ahead."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from trl.trainer.utils import RepeatSampler


class Foresight(Sampler):
    """TRL's sampler, which also tells the rows of a later batch. It yields what TRL's yields.

    Args:
        sampler: draws a permutation an epoch from a generator of its own.
    """

    def __init__(self, sampler: RepeatSampler):
        self._sampler = sampler
        self._epoch: list[int] = []  # the rows of this epoch, as often as TRL asks for them

    def __iter__(self) -> Iterator[int]:
        self._epoch = [*self._sampler]
        return iter(self._epoch)

    def __len__(self) -> int:
        return len(self._sampler)

    def batch(self, nth: int, rows: int) -> list[int]:
        """The dataset indices of the nth batch of the run, from 0, of which this epoch or the next one has to be the
        first to yield it. Args: rows: of a batch, in all processes."""
        repeated = rows * self._sampler.repeat_count
        per_epoch = len(self._epoch) // repeated
        if not per_epoch:
            return []
        within = nth % per_epoch
        epoch = self._epoch if within else [*self._again()]
        return epoch[within * repeated : within * repeated + rows]

    def _again(self) -> RepeatSampler:
        """The sampler of the next epoch, which has the same generator in a copy."""
        again = copy.copy(self._sampler)
        if again.shuffle:
            again.generator = torch.Generator()
            again.generator.set_state(self._sampler.generator.get_state())
        return again


def upcoming(trainer: Any, sampler: Foresight | None, nth: int) -> list:
    """This process's prompts of the nth batch of the run; none where they cannot be known, or after the last one.

    Args:
        trainer: a TRL trainer that generates the batch before it.
        sampler: of its training rows; None where TRL has another one, as for a dataset that is streamed.
    """
    args = trainer.args
    batches = trainer.state.max_steps * args.gradient_accumulation_steps
    if sampler is None or nth * args.steps_per_generation * trainer.num_iterations >= batches:
        return []
    indices = sampler.batch(nth, args.generation_batch_size)
    share = len(indices) // trainer.accelerator.num_processes
    first = share * trainer.accelerator.process_index
    return [trainer.train_dataset[index]["prompt"] for index in indices[first : first + share]]
