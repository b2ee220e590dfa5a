"""What a drafter learns from the policy, and how: one recipe for its first distillation and for co-training.

A draft model learns the policy's law at every response token. A head learns it more than once: from the policy's hidden
states, which it has where a draft begins, and from mixtures of these and its own, which it has further on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from transformers import PreTrainedModel

from specrl.rollout.engines.local.head import Head
from specrl.rollout.noise import process_logits
from specrl.trainers.cotraining.distances import forward_kl, largest, tvd
from specrl.trainers.cotraining.texts import Read

OBJECTIVES = {"forward_kl": forward_kl, "tvd": tvd}
KEPT = 0.4  # AdaSPEC: share of tokens kept, the paper's
PASSES, OWN = 3, 0.8  # of a head, and the share of the states that a pass has from the one before
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts without their last tokens, padded on the right, where causal attention never looks."""

    ids: Tensor
    """[B, T]"""
    states: Tensor
    """The policy's last hidden states at these tokens [B, T, H]."""
    spots: Tensor
    """True where a state predicts a response token that the drafter is asked for, N in all [B, T]."""
    places: Tensor
    """(number of the text, position in its response) of each of the N tokens [N, 2]."""

    @classmethod
    def of(cls, reads: Sequence[Read], student: Module) -> Batch:
        """A head is not asked for a response's first token: only behind it there are a state and a drawn token."""
        device, first = reads[0].states.device, int(isinstance(student, Head))
        ids = pad_sequence([torch.tensor([*r.text.prompt, *r.text.response[:-1]]) for r in reads], batch_first=True)
        spots = torch.zeros(ids.shape, dtype=torch.bool)
        for row, read in zip(spots, reads, strict=True):
            row[len(read.text.prompt) - 1 + first : len(read.text) - 1] = True
        places = [(n, t) for n, read in enumerate(reads) for t in range(first, len(read.text.response))]
        states = pad_sequence([read.states for read in reads], batch_first=True)
        return cls(ids.to(device), states, spots.to(device), torch.tensor(places, device=device).view(-1, 2))


def taught(policy: PreTrainedModel, batch: Batch) -> Tensor:
    """The policy's logits [N, V] at the spots, by its output layer as it is now."""
    layer = policy.get_output_embeddings()
    with torch.no_grad():
        return layer(batch.states[batch.spots].to(layer.weight.dtype))


def guesses(student: PreTrainedModel, batch: Batch, generator: torch.Generator) -> Iterator[Tensor]:
    """The student's logits [N, V] at the spots: a draft model's once, a head's by each of PASSES passes.

    The first reads the policy's states. In every further one OWN of the states, drawn at random, are those of the pass
    before it, without gradients through these.
    """
    output = student.get_output_embeddings()
    if not isinstance(student, Head):
        yield output(student.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state[batch.spots])
        return
    states = batch.states.to(student.dtype)
    for _ in range(PASSES):
        made = student(batch.ids[:, 1:], states[:, :-1]).last_hidden_state  # the first stands for the second state
        yield output(made[batch.spots[:, 1:]])
        own = torch.rand(batch.ids.shape, generator=generator).to(made.device)[..., None] < OWN
        states = torch.where(own, torch.cat([batch.states[:, :1].to(made.dtype), made.detach()], 1), batch.states)


def selected(student: Tensor, reference: Tensor, teacher: Tensor) -> Tensor:
    """AdaSPEC's tokens (arXiv 2510.19779), True [N]: where the student is furthest behind the reference. Logits [N, V].

    The reference is a copy of the student that was distilled on all tokens before. What it could not learn either is
    left out.
    """
    with torch.no_grad():
        return largest(forward_kl(student, teacher) - forward_kl(reference, teacher), KEPT)


def loss(
    student: Tensor, teacher: Tensor, objective: str, temperature: float = 1.0, kept: Tensor | None = None
) -> Tensor:
    """Mean distance of the laws at a temperature over the tokens `kept` [N], or all.

    Args: student, teacher: logits [N, V]; objective: of OBJECTIVES.
    """
    pair = (process_logits(z if kept is None else z[kept], temperature) for z in (student, teacher))
    return OBJECTIVES[objective](*pair).mean()


def step(optimizer: Optimizer, total: Tensor) -> Tensor:
    """One step down the gradient of `total`; returns the gradient's norm before it was clipped.

    Nothing is changed where that is not finite. Gradients go to the optimiser's weights only: a head reads and writes
    by layers of the policy, which is in training too.
    """
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for weight, gradient in zip(weights, torch.autograd.grad(total, weights, allow_unused=True), strict=True):
        weight.grad = gradient
    norm = clip_grad_norm_(weights, MAX_GRAD_NORM)
    if norm.isfinite():
        optimizer.step()
    optimizer.zero_grad()
    return norm
