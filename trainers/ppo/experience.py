"""A rollout batch as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from specrl.rollout.types import Completion, Row


@dataclass
class Experience:
    """Rows of a rollout as an update sees them. Prompts are padded on the left; [B, T] runs over response tokens."""

    ids: Tensor
    """Prompt and response [B, P + T]."""
    attention: Tensor
    """1 for tokens, 0 for padding [B, P + T]."""
    mask: Tensor
    """1 for tokens of rows with a reward, of which an update sees those that are trained on; else 0 [B, T]."""
    drawn: Tensor
    """The engine's log-probs [B, T]."""
    own: Tensor | None = None
    """The trainer's log-probs, before the update [B, T]."""
    old: Tensor | None = None
    """Log-probs that an update's ratios are against, one of the two [B, T]."""
    advantages: Tensor | None = None
    values: Tensor | None = None
    """The critic's, before the update [B, T]; None without a critic."""
    facts: Tensor | None = None
    """What the prior looks at [B, T, FACTS]."""
    prior: Tensor | None = None
    """Value before each token without a network [B, T], on which the critic builds: trainers/ppo/prior.py."""
    returns: Tensor | None = None
    reference: Tensor | None = None
    """Log-probs under the initial policy [B, T]; None without a KL penalty."""

    @classmethod
    def of(
        cls, rows: Sequence[Row], done: Sequence[Completion], known: Sequence[bool], pad_id: int, device: torch.device
    ) -> Experience:
        """Rows with their responses as padded tensors; rows whose reward is not `known` get no mask."""
        before, after = max(len(row.prompt) for row in rows), max(len(c.tokens) for c in done)
        ids = torch.full((len(rows), before + after), pad_id)
        attention, drawn = torch.zeros_like(ids), torch.zeros(len(rows), after)
        mask = torch.zeros_like(drawn)
        for i, (row, c) in enumerate(zip(rows, done, strict=True)):
            start, end = before - len(row.prompt), before + len(c.tokens)
            ids[i, start:end] = torch.tensor([*row.prompt, *c.tokens])
            attention[i, start:end] = 1
            drawn[i, : len(c.tokens)] = torch.tensor(c.logprobs)
            mask[i, : len(c.tokens)] = float(known[i])
        return cls(ids.to(device), attention.to(device), mask.to(device), drawn.to(device))

    @property
    def length(self) -> int:
        """T."""
        return self.mask.shape[1]

    def select(self, rows: slice) -> Experience:
        """Some of the rows."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: part[rows] for name, part in given.items() if part is not None})

    def split(self, rows: int) -> Iterator[Experience]:
        """Consecutive pieces of so many rows."""
        return (self.select(slice(i, i + rows)) for i in range(0, len(self.ids), rows))
