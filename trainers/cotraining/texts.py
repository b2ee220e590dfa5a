"""The policy's texts that a drafter learns from, with the hidden states that the update computes of them anyway."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specrl.rollout.engines.base import evaluation


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the policy's response to it. `len` counts both."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, slots=True)
class Read:
    """A text with the policy's last hidden states, from which its output layer makes the logits to learn."""

    text: Text
    states: Tensor
    """At all tokens but the last, detached [len(text) - 1, H]."""


class Tap:
    """Keeps the last hidden states of chosen texts from the policy's forwards in training mode.

    Micro-batches bring some texts each. Of several forwards of a text, as in the epochs of PPO, the first counts, as
    its weights are those that wrote the text. Rows are recognised by their ids, wherever their padding is.

    Args: policy: a causal LM of transformers, without adapters' wrappers.
    """

    def __init__(self, policy: Any):
        self._wanted: dict[tuple[int, ...], Text] = {}
        self._reads: list[Read] = []
        policy.base_model.register_forward_hook(self._on_forward, with_kwargs=True)

    def want(self, texts: Mapping[Text, Text]) -> None:
        """Waits for these texts from now on. Args: texts: text -> the part of it that is kept."""
        self._wanted = {(*text.prompt, *text.response): part for text, part in texts.items()}

    def take(self) -> list[Read]:
        """What came since the last call."""
        reads = self._reads
        self._reads = []
        return reads

    def _on_forward(self, decoder: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> None:
        if not (self._wanted and decoder.training and torch.is_grad_enabled()):
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            return
        mask = kwargs.get("attention_mask")
        if mask is None or mask.shape != ids.shape:
            mask = torch.ones_like(ids)
        for n, (row, row_mask) in enumerate(zip(ids.tolist(), mask.tolist(), strict=True)):
            if part := self._wanted.pop(tuple(compress(row, row_mask)), None):
                positions = mask[n].nonzero()[: len(part) - 1, 0]
                self._reads.append(Read(part, output.last_hidden_state[n, positions].detach()))


@torch.no_grad()
def read(model: Any, texts: Sequence[Text]) -> list[Read]:
    """The texts with the states of one forward of the model in evaluation mode."""
    device = model.get_output_embeddings().weight.device
    ids = pad_sequence([torch.tensor([*t.prompt, *t.response[:-1]]) for t in texts], batch_first=True)
    with evaluation(model):
        hidden = model.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state
    return [Read(text, row[: len(text) - 1].clone()) for row, text in zip(hidden, texts, strict=True)]


def chosen(texts: Sequence[Text], tokens: int, max_length: int, generator: torch.Generator) -> dict[Text, Text]:
    """Random texts with `tokens` tokens together, or all texts: text -> the part of it to learn from.

    Texts are cut to `max_length` tokens, and the last one to the tokens that are left. A text of which fewer than two
    response tokens would be left is skipped.
    """
    parts: dict[Text, Text] = {}
    for i in torch.randperm(len(texts), generator=generator).tolist():
        text = texts[i]
        if text in parts:
            continue
        response_length = min(tokens, max_length, len(text)) - len(text.prompt)
        if response_length < min(2, len(text.response)):
            if tokens < max_length:
                break
            continue
        parts[text] = Text(text.prompt, text.response[:response_length])
        tokens -= len(parts[text])
    return parts


def batches(reads: Sequence[Read], tokens: int) -> Iterator[list[Read]]:
    """Consecutive reads of at most `tokens` tokens together, or a single one that is longer."""
    batch: list[Read] = []
    size = 0
    for item in reads:
        if batch and size + len(item.text) > tokens:
            yield batch
            batch = []
            size = 0
        batch.append(item)
        size += len(item.text)
    if batch:
        yield batch
