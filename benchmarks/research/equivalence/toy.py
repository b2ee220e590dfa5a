"""A policy small enough that its expected reward is computed, not sampled, through the product's engine.

Tasks are little grammars: a response of symbols earns 1 when it takes `GOOD` right transitions and then ends by itself,
else 0. The policy is a table of logits by (task, last symbol). It poses as a causal LM of transformers, so that drafts,
keys, verification, KV and cache are those of any run; the task is read back from the KV of the prompt's first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from specrl.rollout.build import build_engine
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import Engine, EngineSpec
from specrl.rollout.engines.local import probe
from specrl.rollout.engines.local.padded import PaddedPass

SYMBOLS, TASKS, CAP, GOOD = 6, 6, 10, 3
"""Symbol 0 ends a response. A prompt is (task, 0), so that there are as many tasks as symbols."""
END = 0


class TablePolicy(nn.Module):
    """Logits of the next symbol by (task, last symbol).

    Args: logits [TASKS, SYMBOLS, SYMBOLS].
    """

    def __init__(self, logits: Tensor):
        super().__init__()
        self.base_model = Decoder()
        self.head = nn.Linear(TASKS * SYMBOLS, SYMBOLS, bias=False)
        self.head.weight = nn.Parameter(logits.reshape(-1, SYMBOLS).T.clone())
        self.config = PretrainedConfig(attn_implementation="eager", max_position_embeddings=CAP + 2)
        self.dtype = torch.float32

    @property
    def logits(self) -> Tensor:
        """[TASKS, SYMBOLS, SYMBOLS]."""
        return self.head.weight.T.reshape(TASKS, SYMBOLS, SYMBOLS)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """Logits [1, N, SYMBOLS] of one text without padding."""
        task = input_ids[0, :1].expand(input_ids.shape[1])
        return SimpleNamespace(logits=self.head(states(task, input_ids[0]))[None])

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name


class Decoder(nn.Module):
    """The part below the head: each token attends to nothing but itself and its row's first token."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool, layout: PaddedPass) -> SimpleNamespace:
        written = input_ids[..., None].float()  # one head of one dimension
        keys, _ = layout.write(0, written, written)
        return SimpleNamespace(last_hidden_state=states(keys[layout.rows, 0, 0, 0].long(), input_ids[0])[None])


def engine_of(policy: TablePolicy, config: RolloutConfig) -> Engine:
    """The product's engine around a table, without the probe of a transformer's layers, which a table lacks."""
    with mock.patch.object(probe, "probe", return_value=(policy.config.max_position_embeddings, "")):
        return build_engine(EngineSpec(eos_ids=frozenset({END}), rollout=config), policy)


def states(task: Tensor, last: Tensor) -> Tensor:
    """One-hot hidden states [N, TASKS * SYMBOLS]; task, last int64 [N]."""
    return nn.functional.one_hot(task * SYMBOLS + last, TASKS * SYMBOLS).float()


def right_transitions(seed: int) -> Tensor:
    """1 where a transition counts [TASKS, SYMBOLS, SYMBOLS]: in each task one symbol is the right one after another."""
    random = torch.Generator().manual_seed(seed)
    right = torch.zeros(TASKS, SYMBOLS, SYMBOLS)
    for task in right:
        order = 1 + torch.randperm(SYMBOLS - 1, generator=random)
        task[torch.cat([torch.zeros(1, dtype=torch.long), order]), torch.cat([order, order[:1]])] = 1
    return right


def initial_logits(seed: int, right: Tensor) -> Tensor:
    """A policy that has been pretrained a little: it earns about 0.2."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(right.shape, generator=random) * 1.5 + 2.6 * right
    logits[..., END] = 0.5
    return logits


def reward(response: Sequence[int], right: Sequence[Sequence[float]]) -> float:
    """1 for a response that ends by itself after at least GOOD transitions that are right in its task, else 0."""
    steps = zip((END, *response[:-1]), response, strict=True)
    return float(response[-1] == END and sum(right[a][b] for a, b in steps) >= GOOD)


def expected_rewards(logits: Tensor, right: Tensor) -> Tensor:
    """The exact expected reward of each task [TASKS], float64, from the mass of (right transitions, last symbol).

    Args: logits, right [TASKS, SYMBOLS, SYMBOLS].
    """
    probabilities = logits.detach().double().softmax(-1)
    good = right.double()
    mass = torch.zeros(TASKS, GOOD + 1, SYMBOLS, dtype=torch.float64)
    mass[:, 0, END] = 1.0
    earned = torch.zeros(TASKS, dtype=torch.float64)
    for _ in range(CAP):
        stays, counts = mass @ (probabilities * (1 - good)), mass @ (probabilities * good)
        earned += stays[:, GOOD, END]
        mass = stays
        mass[:, 1:] += counts[:, :-1]
        mass[:, GOOD] += counts[:, GOOD]
        mass[..., END] = 0.0
    return earned
