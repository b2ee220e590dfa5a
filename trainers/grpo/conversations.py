"""Which conversation of a batch a row of a later turn continues, and the example and the visit that its keys need."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specrl.rollout.keys import Visits, occurrences
from specrl.rollout.types import RolloutError, Row

Gather = Callable[[list], list]
"""Turns a list of this process into that of all processes, in the order of the processes; collective."""


@dataclass
class Conversation:
    """One sample of a prompt: its responses, and the tool results or user messages between them."""

    example_id: str
    """Hash of the first prompt's token ids."""
    sample_index: int
    """Of all rows of the batch with this first prompt, in all processes."""
    visit: int
    """How often the prompt was rolled out before."""
    prompt_tokens: int
    """Of the first prompt: a trainer's cap counts what follows it."""
    tokens: list[int]
    """First prompt, and everything that followed it so far."""

    def begins(self, ids: Sequence[int]) -> bool:
        """Whether these token ids continue the conversation."""
        n = len(self.tokens)
        return len(ids) >= n and list(ids[:n]) == self.tokens

    def row(self, ids: Sequence[int], turn: int, cap: int) -> Row:
        """The row of a turn, whose key is a hash of (seed, first prompt, turn, sample index, visit).

        What tools answered is part of the prompt and of no key: a changed answer costs accepted drafts only.

        Args:
            ids: prompt of the turn.
            turn: its number, from 0.
            cap: most tokens of its response.
        """
        example_id = f"{self.example_id}/{turn}" if turn else self.example_id
        return Row(example_id, tuple(ids), max_new_tokens=cap)


def begin(prompts: Sequence[Sequence[int]], visits: Visits, gather: Gather, process: int) -> list[Conversation]:
    """The conversations of a batch, which is one visit to each of its prompts; every process takes part.

    Args:
        prompts: token ids of this process's first prompts.
        visits: counts of the run, equal in all processes; this visit is counted.
        process: index of this process.
    """
    names = [hashlib.blake2b(repr([*ids]).encode(), digest_size=16).hexdigest() for ids in prompts]
    parts = gather([names])
    everyone = [name for part in parts for name in part]
    first = sum(map(len, parts[:process]))
    share = slice(first, first + len(names))
    columns = zip(names, occurrences(everyone)[share], visits.next(everyone)[share], prompts, strict=True)
    return [Conversation(name, index, visit, len(ids), [*ids]) for name, index, visit, ids in columns]


def match(conversations: Sequence[Conversation], prompts: Sequence[Sequence[int]]) -> list[Conversation]:
    """The conversation that each prompt of a later turn continues.

    A trainer passes the conversations that go on, in their order and without an index. Several fit a prompt only if
    they are equal so far; taking one for the other costs drafts and repeats no key.

    Raises:
        RolloutError: a prompt continues none, or they come in another order.
    """
    rest = iter(conversations)
    matched: list[Conversation] = []
    for ids in prompts:
        conversation = next((conversation for conversation in rest if conversation.begins(ids)), None)
        if conversation is None:
            raise RolloutError(
                f"row {len(matched)} of a later turn continues no conversation of the batch in its order, so it has no "
                "noise key. The trainer must append to the token ids of earlier turns, as trl==1.16.0 does"
            )
        matched.append(conversation)
    return matched
