"""A rollout batch as tensors: prompts padded on the left, responses on the right; [B, T] runs over response tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from specrl.rollout.types import Completion, Row


@dataclass
class Responses:
    """Prompts with their responses."""

    ids: Tensor
    """Prompt and response [B, P + T]."""
    attention: Tensor
    """1 for tokens, 0 for padding [B, P + T]."""
    mask: Tensor
    """1 for tokens of rows with a reward, later only of those that are trained on; else 0 [B, T]."""
    rollout_logprobs: Tensor
    """The engine's log-probs [B, T]."""

    @classmethod
    def of(
        cls, rows: Sequence[Row], done: Sequence[Completion], known: Sequence[bool], pad_id: int, device: torch.device
    ) -> Responses:
        """Pads the rows. A row whose reward is not `known` gets no mask."""
        prompt_length = max(len(row.prompt) for row in rows)
        response_length = max(len(c.tokens) for c in done)
        ids = torch.full((len(rows), prompt_length + response_length), pad_id)
        attention = torch.zeros_like(ids)
        logprobs = torch.zeros(len(rows), response_length)
        mask = torch.zeros_like(logprobs)
        for i, (row, c) in enumerate(zip(rows, done, strict=True)):
            length = len(c.tokens)
            start = prompt_length - len(row.prompt)
            ids[i, start : prompt_length + length] = torch.tensor([*row.prompt, *c.tokens])
            attention[i, start : prompt_length + length] = 1
            logprobs[i, :length] = torch.tensor(c.logprobs)
            mask[i, :length] = float(known[i])
        return Responses(ids.to(device), attention.to(device), mask.to(device), logprobs.to(device))

    @property
    def length(self) -> int:
        """T."""
        return self.mask.shape[1]

    def select(self, rows: slice) -> Self:
        """Some of the rows."""
        return type(self)(**{field.name: _select(getattr(self, field.name), rows) for field in fields(self)})

    def split(self, rows: int) -> Iterator[Self]:
        """Consecutive parts of this many rows."""
        return (self.select(slice(i, i + rows)) for i in range(0, len(self.ids), rows))


class ValueTargets(NamedTuple):
    """What the critic is trained on [B, T]."""

    values: Tensor
    """Its values before the update, which include the prior's."""
    prior: Tensor
    """Values without a network (`trainers/ppo/prior.py`), to which the critic's output is added."""
    returns: Tensor


@dataclass
class Experience(Responses):
    """Responses with all that an update needs."""

    policy_logprobs: Tensor
    """The trainer's log-probs before the update [B, T]."""
    old_logprobs: Tensor
    """The denominator of an update's ratios: the engine's or the trainer's log-probs [B, T]."""
    advantages: Tensor
    critic: ValueTargets | None = None
    reference_logprobs: Tensor | None = None
    """Under the initial policy [B, T]; None without a KL penalty."""


def _select(part: Any, rows: slice) -> Any:
    """Rows of a tensor or of a tuple of tensors; None stays None."""
    if isinstance(part, ValueTargets):
        return ValueTargets(*(tensor[rows] for tensor in part))
    return None if part is None else part[rows]


def response_metrics(
    done: Sequence[Completion], totals: Tensor, group_size: int, gather: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Rewards and lengths of the rollout of all processes, groups side by side, under TRL's names.

    Args:
        totals: rewards of this process's rows, NaN for none [B].
        group_size: responses of a prompt.
        gather: concatenates a tensor over all processes.
    """
    lengths = gather(torch.tensor([len(c.tokens) for c in done], device=totals.device))
    ended = gather(torch.tensor([c.finish == "stop" and not c.failure for c in done], device=totals.device))
    rewards = gather(totals)
    groups = rewards.view(-1, group_size)
    known = ~groups.isnan().all(-1)
    low = groups.nan_to_num(torch.inf).amin(-1)
    high = groups.nan_to_num(-torch.inf).amax(-1)
    scored = rewards[~rewards.isnan()]
    metrics = {
        "reward": scored.mean().item(),
        "reward_std": scored.std(correction=int(len(scored) > 1)).item(),
        "frac_reward_zero_std": (high - low)[known].eq(0).float().mean().item(),
        "completions/clipped_ratio": 1 - ended[lengths > 0].float().mean().item(),
    }
    for kind, chosen in (("", lengths > 0), ("terminated_", ended)):
        selected = lengths[chosen].float()
        if len(selected):
            metrics[f"completions/mean_{kind}length"] = selected.mean().item()
            metrics[f"completions/min_{kind}length"] = selected.min().item()
            metrics[f"completions/max_{kind}length"] = selected.max().item()
    return metrics
