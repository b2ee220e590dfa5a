"""The policy's own texts, which a draft model learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the policy's response to it. `len` counts both."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    version: int
    """Weight version of the policy that wrote it."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def within(texts: Sequence[Text], versions: int, tokens: int) -> list[Text]:
    """The latest of `texts` (oldest first) that hold at most `versions` weight versions' worth and `tokens` tokens."""
    kept, total = [], 0
    for text in reversed(texts):
        total += len(text)
        if text.version <= texts[-1].version - versions or total > tokens:
            break
        kept.append(text)
    return kept[::-1]


def batches(texts: Sequence[Text], count: int, tokens: int, generator: torch.Generator) -> Iterator[list[Text]]:
    """`count` random batches of at most `tokens` tokens or one text; a text returns when all have had their turn."""
    order: list[int] = []
    for _ in range(count):
        batch: list[Text] = []
        total = 0
        while len(batch) < len(texts):
            order = order or torch.randperm(len(texts), generator=generator).tolist()
            total += len(texts[order[-1]])
            if batch and total > tokens:
                break
            batch.append(texts[order.pop()])
        yield batch


def response_states(model: torch.nn.Module, texts: Sequence[Text]) -> Tensor:
    """Last hidden states [N, H], in evaluation mode, that predict the response tokens of one text after the other.

    Those of response token t are *at* the token before it, sequence index len(prompt) + t - 1. Padding is on the right,
    where causal attention never looks.
    """
    training = model.training
    model.eval()
    device = model.get_output_embeddings().weight.device
    ids = pad_sequence([torch.tensor([*t.prompt, *t.response[:-1]]) for t in texts], batch_first=True)
    hidden = model.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state
    model.train(training)
    return torch.cat([row[len(t.prompt) - 1 :][: len(t.response)] for row, t in zip(hidden, texts, strict=True)])


def response_logits(model: torch.nn.Module, texts: Sequence[Text]) -> Tensor:
    """Logits [N, V] of `response_states`."""
    return model.get_output_embeddings()(response_states(model, texts))
