"""How a drafter learns from the policy: one recipe for its first distillation and for co-training.

A draft model learns the policy's distribution at every response token. A head learns it in several passes: in the first
from the policy's hidden states, which it has where a draft begins, and then from mixtures of these and its own, which
it has further into a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from transformers import PreTrainedModel

from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.head import Head
from specrl.rollout.noise import keyed_sample, process_logits
from specrl.trainers.cotraining.texts import Read, batches

KEPT_SHARE = 0.4  # of the tokens, in AdaSPEC; the paper's value
HEAD_PASSES = 3
OWN_SHARE = 0.8  # of the states that a head's later passes take from the pass before
MAX_GRAD_NORM = 1.0

# The distance between the distributions of student and teacher, at each of N tokens ----------------------------------


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) [N], in nats: the student covers all that the teacher may sample.

    Args: student, teacher: finite logits [N, V] of any float type, at the same temperature.
    """
    p = teacher.float().log_softmax(-1)
    q = student.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def largest(values: Tensor, share: float) -> Tensor:
    """True [N] for the values [N] that reach the (1 - share) quantile, at least one; ties with it are included."""
    n = values.numel()
    count = min(n, max(1, round(share * n)))
    return values >= values.kthvalue(n - count + 1).values


# A batch and its logits ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts without their last tokens, padded on the right, where causal attention never looks."""

    ids: Tensor
    """[B, T]"""
    states: Tensor
    """The policy's last hidden states at these tokens [B, T, H]."""
    mask: Tensor
    """True where a state predicts a response token that the drafter learns, N in all [B, T]."""
    targets: Tensor
    """(index of the text, position in its response) of each of the N tokens [N, 2]."""

    @classmethod
    def of(cls, reads: Sequence[Read], student: Module) -> Batch:
        """A head does not learn a response's first token: it drafts only after a state and a sampled token."""
        device = reads[0].states.device
        first = int(isinstance(student, Head))
        ids = pad_sequence([torch.tensor([*r.text.prompt, *r.text.response[:-1]]) for r in reads], batch_first=True)
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        for row, read in zip(mask, reads, strict=True):
            row[len(read.text.prompt) - 1 + first : len(read.text) - 1] = True
        targets = [(n, t) for n, read in enumerate(reads) for t in range(first, len(read.text.response))]
        states = pad_sequence([read.states for read in reads], batch_first=True)
        return cls(ids.to(device), states, mask.to(device), torch.tensor(targets, device=device).view(-1, 2))


def to_learn(reads: Sequence[Read], student: Module, tokens: int) -> Iterator[Batch]:
    """Batches of at most `tokens` tokens, or of one longer text, in which the student has something to learn."""
    for part in batches(reads, tokens):
        batch = Batch.of(part, student)
        if len(batch.targets):
            yield batch


@contextmanager
def whole(policy: PreTrainedModel, student: PreTrainedModel) -> Iterator[None]:
    """Gathers the layers of the policy that the student learns from, if FSDP 2 shards it. Every process must enter.

    Meanwhile their `forward` can be called, but not the layers themselves: hooks would begin a pass of all the policy.
    """
    layers: Any = policy.get_output_embeddings(), student.get_output_embeddings(), student.get_input_embeddings()
    sharded = [layer for layer in layers if hasattr(layer, "unshard")]
    for layer in sharded:
        layer.unshard()
    try:
        yield
    finally:
        for layer in sharded:
            layer.reshard()


def written(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Logits [N, V] of a model's output layer for final hidden states [N, H]. See `whole`."""
    layer: Any = model.get_output_embeddings()
    return layer.forward(states.to(layer.weight.dtype))


def teacher_logits(policy: PreTrainedModel, batch: Batch) -> Tensor:
    """The policy's logits [N, V] for the targets, by its current output layer."""
    with torch.no_grad():
        return written(policy, batch.states[batch.mask])


def student_logits(student: PreTrainedModel, batch: Batch, generator: torch.Generator) -> Iterator[Tensor]:
    """The student's logits [N, V] for the targets: once of a draft model, HEAD_PASSES times of a head.

    A head's first pass reads the policy's states. In every further one OWN_SHARE of the states, chosen at random, are
    those of the pass before, without gradients through these.
    """
    if not isinstance(student, Head):
        yield written(student, student.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state[batch.mask])
        return
    states = batch.states.to(student.dtype)
    for _ in range(HEAD_PASSES):
        predicted = student(batch.ids[:, 1:], states[:, :-1]).last_hidden_state  # the first replaces the second state
        yield written(student, predicted[batch.mask[:, 1:]])
        from_student = torch.rand(batch.ids.shape, generator=generator).to(predicted.device)[..., None] < OWN_SHARE
        shifted = torch.cat([batch.states[:, :1].to(predicted.dtype), predicted.detach()], 1)
        states = torch.where(from_student, shifted, batch.states)


# Measuring -----------------------------------------------------------------------------------------------------------


def keyed_samples(logits: Tensor, batch: Batch, keys: Sequence[int], sampling: SamplingParams) -> Tensor:
    """Tokens [N] sampled from logits [N, V] for the targets. Args: keys: of each text's noise."""
    texts, positions = batch.targets.unbind(1)
    noise = torch.tensor(keys, device=texts.device)[texts]
    return keyed_sample(
        logits, noise, positions, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
    )[0]


# Learning ------------------------------------------------------------------------------------------------------------


def selected(student: Tensor, reference: Tensor, teacher: Tensor) -> Tensor:
    """AdaSPEC's tokens (arXiv 2510.19779), True [N]: where the student is worse than the reference. Logits [N, V].

    The reference is a copy of the student that was distilled on all tokens before. Tokens that it could not learn
    either are left out.
    """
    with torch.no_grad():
        return largest(forward_kl(student, teacher) - forward_kl(reference, teacher), KEPT_SHARE)


def loss(student: Tensor, teacher: Tensor, temperature: float = 1.0, kept: Tensor | None = None) -> Tensor:
    """Mean `forward_kl` of the distributions at a temperature, over the tokens `kept` [N] or all.

    Args: student, teacher: logits [N, V].
    """
    if kept is not None:
        student = student[kept]
        teacher = teacher[kept]
    return forward_kl(process_logits(student, temperature), process_logits(teacher, temperature)).mean()


def step(
    optimizer: Optimizer, total: Tensor | None, combine: Callable[[Tensor], Tensor] = lambda gradient: gradient
) -> Tensor:
    """One step down the gradient of `total`; returns the gradient's norm before clipping.

    Nothing changes if the norm is not finite. Gradients go to the optimiser's weights only: a head reads and writes by
    layers of the policy, which is being trained too.

    Args:
        total: None in a process that has nothing to learn from.
        combine: turns the gradient of a weight into that of all processes.
    """
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    gradients: Sequence[Tensor] = [torch.zeros_like(weight) for weight in weights]
    if total is not None:
        gradients = torch.autograd.grad(total, weights, materialize_grads=True)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = combine(gradient)
    norm = clip_grad_norm_(weights, MAX_GRAD_NORM)
    if norm.isfinite():
        optimizer.step()
    optimizer.zero_grad()
    return norm
