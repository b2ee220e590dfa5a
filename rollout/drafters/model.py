"""Drafts from a small causal LM that draws with the policy's own noise."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import torch
from torch import nn

from rollout.budget import Budget
from rollout.chain import Chain
from rollout.engines.base import Sampling
from rollout.engines.ragged import Pass, RaggedModel, chunks
from rollout.types import Request, RolloutError


class ModelDrafter:
    """Chain drafts for a whole batch: what a small model would emit with each row's key at each position.

    Model and policy add the same noise to their logits, so their draws agree with probability about 1 - TV where two
    independent draws agree with sum(p * q). The model's KV is its own; rolling back is comparing what it holds of a row
    with what the row has emitted since, and writing on from the first difference.

    Args:
        model: any causal LM that the transformers engine runs, with the policy's vocabulary.
        vocab: size of the policy's vocabulary.
        sampling: the policy's sampling law, which the drafts follow.
        bounds: `tokens_per_pass` and `logits_mb`, see RolloutConfig.

    Raises:
        RolloutError: the vocabularies differ, or the model does not run packed passes.
    """

    def __init__(self, model: nn.Module, vocab: int, sampling: Sampling, **bounds: int):
        self._model = RaggedModel(model, sampling, **bounds)
        if self._model.vocab != vocab:
            raise RolloutError(
                f"the draft model knows {self._model.vocab} tokens and the policy {vocab}: its drafts would mean other "
                "texts. Use a draft model with the policy's tokenizer"
            )
        self.inference, self.timing, self.context = self._model.inference, self._model.timing, self._model.context
        self.model = model
        self.dropped = 0
        """Draws thrown away because the model's logits were NaN or infinite."""

    def open(self, requests: Sequence[Request]) -> None:
        """Starts a batch of rows. Nothing is computed before the first draft."""
        self._requests, self._kv = list(requests), None
        self._held: list[list[int]] = [[] for _ in requests]  # tokens written from the prompt's last on, right or wrong
        self._sure = [0] * len(requests)  # how many of these the row is known to have emitted

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the rows of the given places, in that order."""
        columns = (self._requests, self._held, self._sure)
        self._requests, self._held, self._sure = ([column[row] for row in rows] for column in columns)
        if self._kv is not None:
            self._kv.select(torch.tensor(rows, device=self._model.device, dtype=torch.long))

    def propose(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], room: Sequence[int], chain: Chain, budget: Budget
    ) -> list[list[int]]:
        """Drafts for some rows of the batch: one pass catches up with what they emitted, each further adds a token.

        Args:
            rows: places of the rows in the batch, ascending.
            texts: the responses they have emitted so far.
            room: most tokens of each draft, at least 1.
            chain: the stop rule, over indices into `rows`.
            budget: told what every pass took.
        """
        drafts: list[list[int]] = [[] for _ in rows]
        if chain.going and self._kv is None:
            self._kv, _ = self._model.prefill([request.prompt for request in self._requests])
        feed = {i: self._missing(rows[i], texts[i]) for i in chain.going}
        while going := chain.going:
            began = time.perf_counter()
            at = [len(texts[i]) + len(drafts[i]) for i in going]
            draws, logprobs = self._draw([rows[i] for i in going], [feed[i] for i in going], at)
            budget.drafter.observe(sum(len(feed[i]) for i in going), time.perf_counter() - began, len(going))
            drawn = dict(zip(going, draws, strict=True))
            for i in chain.step(logprobs, room):
                drafts[i].append(drawn[i])
            feed = {i: drafts[i][-1:] for i in chain.going}
        return drafts

    def behind(self, row: int, length: int) -> int:
        """About how many tokens the model must run before it drafts for a row that has emitted `length` tokens."""
        return max(1, length + 1 - len(self._held[row]))

    def _missing(self, row: int, text: Sequence[int]) -> list[int]:
        """The tokens of the row that its KV lacks, at least the last; what the KV holds beyond is given up."""
        held, sure = self._held[row], self._sure[row]
        rest = [*text[sure - 1 :]] if sure else [self._requests[row].prompt[-1], *text]
        same = 0
        while same < min(len(rest) - 1, len(held) - sure) and held[sure + same] == rest[same]:
            same += 1
        self._sure[row] = sure + same
        del held[sure + same :]
        return rest[same:]

    def _draw(self, rows: list[int], feed: list[list[int]], at: list[int]) -> tuple[list[int], list[float]]:
        """Writes `feed` behind each row's KV and draws its next token at response position `at`; NaN log-prob: none."""
        first, fed = rows[0], dict(zip(rows, feed, strict=True))
        tokens = [fed.get(row, []) for row in range(first, rows[-1] + 1)]
        lengths, last = list(map(len, tokens)), []
        starts = [
            len(self._requests[first + i].prompt) - 1 + len(self._held[first + i]) if n else 0
            for i, n in enumerate(lengths)
        ]
        for a, b in chunks(lengths, self._model.tokens_per_pass):
            layout = Pass(self._kv, first + a, starts[a:b], lengths[a:b], self._model.device)
            hidden = self._model.forward([t for row in tokens[a:b] for t in row], layout)
            ends = torch.tensor(lengths[a:b], device=hidden.device).cumsum(0) - 1
            last.append(hidden[ends[torch.tensor(lengths[a:b], device=hidden.device) > 0]])
        for row, new in fed.items():
            self._held[row] += new
        draws, logprobs, _, gaps = self._model.draw(torch.cat(last), [self._requests[row].key for row in rows], at)
        usable = [gap == gap for gap in gaps]
        self.dropped += usable.count(False)
        return draws, [logprob if ok else float("nan") for logprob, ok in zip(logprobs, usable, strict=True)]


def early_exit(model: nn.Module, layers: int) -> nn.Module:
    """The model's own first `layers` layers under its last norm and head, all weights shared.

    Raises:
        RolloutError: the model has no stack of that many layers.
    """
    decoder, depth = model.base_model, model.config.num_hidden_layers
    stacks = [(n, m) for n, m in decoder.named_children() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if not 1 <= layers < depth or not stacks:
        raise RolloutError(f"an early exit after layer {layers} needs a stack of more layers; the model has {depth}")
    name, stack = stacks[0]
    short, shallow = copy.copy(decoder), copy.copy(model)
    short._modules = {**decoder._modules, name: stack[:layers]}
    shallow._modules = {**model._modules, model.base_model_prefix: short}
    for part in (short, shallow):  # trainers and accelerate hang a `forward` on the instance, bound to the whole model
        part.__dict__.pop("forward", None)
    return shallow
