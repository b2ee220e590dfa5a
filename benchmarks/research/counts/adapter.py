"""Kangaroo (arXiv 2404.18911) with its adapter: a layer trained on the hidden states of an early exit.

The policy's first layers stay as they are and are followed by a trained layer, whole or as published without its MLP,
and the policy's own output layer. A pass costs 1 and a draft token its share of the weights of all layers, as in
`selfspec`'s layers. "Resumed" is Kangaroo's own price: the verification goes on after the exit, so it costs a pass less
the layers of the exit. The one-layer model beside it is distilled by as many steps on the same texts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.research.counts.record import STEPS, Record
from benchmarks.research.responses import response_logits
from benchmarks.research.selfspec.layers import LENGTHS
from benchmarks.research.selfspec.texts import tokens_per_cost
from specrl.drafter import DrafterOptions, distil
from specrl.rollout.noise import keyed_sample

ADAPTERS = ((1, False), (1, True), (2, False))
"""The policy's layers before the adapter, and whether it has an MLP."""


class Nothing(nn.Module):
    """Adds nothing to the residual stream."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden)


class Adapter(nn.Module):
    """Trained layer and norm after the policy's first `exit_at` layers, which are not among its parameters."""

    def __init__(self, policy, exit_at: int, mlp: bool):
        super().__init__()
        self.layer = copy.deepcopy(policy.model.layers[-1])
        self.norm = copy.deepcopy(policy.model.norm)
        if not mlp:
            self.layer.mlp = Nothing()
        self._policy = (policy.model, policy.get_output_embeddings())  # a tuple registers no module
        self._exit_at = exit_at
        self.base_model = self._states

    def _states(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        """States of right-padded texts."""
        decoder = self._policy[0]
        with torch.no_grad():
            hidden = decoder.embed_tokens(input_ids)
            where = decoder.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
            for layer in decoder.layers[: self._exit_at]:
                hidden = layer(hidden, position_embeddings=where)
        return SimpleNamespace(last_hidden_state=self.norm(self.layer(hidden, position_embeddings=where)))

    def get_output_embeddings(self) -> nn.Module:
        return self._policy[1]

    @property
    def price(self) -> float:
        """Share of the weights of all the policy's layers, its exit included."""
        layers = self._policy[0].layers
        return (_size(self.layer) + self._exit_at * _size(layers[0])) / _size(layers)


def measure(record: Record) -> dict:
    """Agreement and tokens per cost of each adapter, and of the one-layer model."""
    depth = record.policy.config.num_hidden_layers
    lines = [line("one distilled layer", record, record.chain, 1 / depth, 0.0)]
    for exit_at, mlp in ADAPTERS:
        adapter = Adapter(record.policy, exit_at, mlp)
        distil(record.policy, adapter, record.learnt, DrafterOptions(steps=STEPS))
        name = f"exit after {exit_at}, {'whole layer' if mlp else 'attention only'}"
        lines.append(line(name, record, adapter.eval(), adapter.price, exit_at / depth))
    return {"lines": lines}


def line(name: str, record: Record, model: nn.Module, price: float, resumed: float) -> dict:
    """Args: price: of a draft token; resumed: what a verification saves that goes on after the exit."""
    hits = [hits_of(model, text, key) for text, key in zip(record.texts, record.keys, strict=True)]
    paid = {length: tokens_per_cost(hits, price, length) for length in LENGTHS}
    less = {length: tokens_per_cost(hits, price / (1 - resumed), length) / (1 - resumed) for length in LENGTHS}
    return {
        "drafts by": name,
        "price": round(price, 4),
        "agreement": round(float(np.mean([hit for text in hits for hit in text])), 4),
        "tokens per cost": round(max(paid.values()), 4),
        "resumed": round(max(less.values()), 4),
        "oracle": round(tokens_per_cost(hits, price, 0), 4),
    }


@torch.no_grad()
def hits_of(model: nn.Module, text, key: int) -> Sequence[bool]:
    at = torch.arange(len(text.response))
    draws = keyed_sample(response_logits(model, [text]).float(), torch.full_like(at, key), at)[0]
    return (draws == torch.tensor(text.response)).tolist()


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
