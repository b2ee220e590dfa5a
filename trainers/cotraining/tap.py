"""What the update computes of the policy's texts anyway."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import Any

import torch
from transformers import PreTrainedModel

from specrl.trainers.cotraining.texts import Read, Text


class Tap:
    """Keeps last hidden states of texts that were asked for, from the policy's own forwards in training.

    Micro-batches bring some texts each. Of several forwards of a text, as in the epochs of PPO, the first counts: it is
    that of the weights that wrote it. Rows are known by their ids, wherever their padding is.

    Args: policy: a causal LM of transformers, without adapters' wrappers.
    """

    def __init__(self, policy: PreTrainedModel):
        self._wanted: dict[tuple[int, ...], Text] = {}
        self._reads: list[Read] = []
        self.forwards = 0
        """That were seen since the texts were asked for."""
        policy.base_model.register_forward_hook(self._hear, with_kwargs=True)

    def want(self, texts: Mapping[Text, Text]) -> None:
        """From now on waits for these texts. Args: texts: whole text -> what of it is kept."""
        self._wanted = {(*whole.prompt, *whole.response): part for whole, part in texts.items()}
        self.forwards = 0

    @property
    def waits(self) -> int:
        """Texts that no forward had yet."""
        return len(self._wanted)

    def take(self) -> list[Read]:
        """What came since the last call."""
        reads, self._reads = self._reads, []
        return reads

    def _hear(self, decoder: torch.nn.Module, args: tuple, given: Mapping[str, Any], output: Any) -> None:
        if not (self._wanted and decoder.training and torch.is_grad_enabled()):
            return
        self.forwards += 1
        ids, mask = given.get("input_ids", args[0] if args else None), given.get("attention_mask")
        if ids is None:
            return
        real = torch.ones_like(ids) if mask is None or mask.shape != ids.shape else mask
        for n, (row, kept) in enumerate(zip(ids.tolist(), real.tolist(), strict=True)):
            if part := self._wanted.pop(tuple(compress(row, kept)), None):
                places = real[n].nonzero()[: len(part) - 1, 0]
                self._reads.append(Read(part, output.last_hidden_state[n, places].detach()))
