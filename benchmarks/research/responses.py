"""Hidden states and logits of a model along responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specrl.trainers.cotraining.texts import Text, read


def response_states(model: nn.Module, texts: Sequence[Text]) -> Tensor:
    """Last hidden states [N, H], in evaluation mode, that predict the response tokens of one text after the other.

    Those of response token t are *at* the token before it, sequence index len(prompt) + t - 1.
    """
    return torch.cat([each.states[len(each.text.prompt) - 1 :] for each in read(model, texts)])


@torch.no_grad()
def response_logits(model: nn.Module, texts: Sequence[Text]) -> Tensor:
    """Logits [N, V] of `response_states`."""
    return model.get_output_embeddings()(response_states(model, texts))
