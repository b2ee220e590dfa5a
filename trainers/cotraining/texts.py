"""The policy's own texts, which a drafter learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specrl.rollout.engines.base import evaluation


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the policy's response to it. `len` counts both."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    version: int
    """Weight version of the policy that wrote it."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, slots=True)
class Read:
    """A text as the policy read it, whose last hidden states teach at any time what its output layer makes of them."""

    text: Text
    states: Tensor
    """At all tokens but the last, detached [len(text) - 1, H]."""


def chosen(texts: Sequence[Text], tokens: int, most: int, generator: torch.Generator) -> dict[Text, Text]:
    """Random ones of `texts` that hold so many tokens together, or all of them: text -> what of it is learned from.

    Texts of more than `most` tokens are cut there, and the last one where it holds too many; what would be left without
    two response tokens is left out.
    """
    found: dict[Text, Text] = {}
    for i in torch.randperm(len(texts), generator=generator).tolist():
        text = texts[i]
        if text in found:
            continue
        room = min(tokens, most, len(text)) - len(text.prompt)
        if room < min(2, len(text.response)):
            if tokens < most:
                break
            continue
        found[text] = Text(text.prompt, text.response[:room], text.version)
        tokens -= len(found[text])
    return found


def within(reads: Sequence[Read], tokens: int) -> list[Read]:
    """The latest of `reads` (oldest first) that hold at most so many tokens."""
    kept, total = [], 0
    for read in reversed(reads):
        total += len(read.text)
        if total > tokens:
            break
        kept.append(read)
    return kept[::-1]


def batches(reads: Sequence[Read], tokens: int) -> Iterator[list[Read]]:
    """Consecutive ones of at most so many tokens, or one text."""
    batch: list[Read] = []
    for each in reads:
        if batch and sum(len(other.text) for other in batch) + len(each.text) > tokens:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


@torch.no_grad()
def read(model: torch.nn.Module, texts: Sequence[Text]) -> list[Read]:
    """What a pass of the model, in evaluation mode, makes of some texts."""
    device = model.get_output_embeddings().weight.device
    ids = pad_sequence([torch.tensor([*t.prompt, *t.response[:-1]]) for t in texts], batch_first=True)
    with evaluation(model):
        hidden = model.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state
    return [Read(text, row[: len(text) - 1].clone()) for row, text in zip(hidden, texts, strict=True)]
