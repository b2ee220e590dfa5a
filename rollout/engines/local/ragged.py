"""Models of transformers that run packed passes: N tokens of many rows side by side, as a batch of one.

So linear layers see no padding at all; what rows are is a matter of attention (attention.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from rollout.engines.base import Limits, Sampling, evaluation
from rollout.engines.local.attention import ATTENTION, Pass, RaggedKV
from rollout.engines.local.supported import check
from rollout.noise import keyed_draw, process_logits
from rollout.types import RolloutError


class Stopped(Exception):
    """The pass was not begun, as the time for it was over."""


class RaggedModel:
    """A decoder-only causal LM of transformers that runs packed passes.

    Args:
        model: any causal LM whose attention goes through transformers' AttentionInterface.
        sampling: the law that tokens are drawn from.
        limits: memory bounds.

    Raises:
        RolloutError: it is no such model, or it computes what packed passes do not.

    Attributes:
        context: most tokens of a prompt with its response.
        limit: why there are no more, where that is not the model's own limit; else empty.
    """

    def __init__(self, model: torch.nn.Module, sampling: Sampling, limits: Limits | None = None):
        if not hasattr(model, "base_model") or model.get_output_embeddings() is None:
            raise RolloutError(f"{type(model).__name__} is not a causal LM of transformers, which this engine needs")
        self.model, self.decoder, self.lm_head = model, model.base_model, model.get_output_embeddings()
        self.vocab = self.lm_head.weight.shape[0]
        self.limits = limits or Limits()
        self.scores_per_chunk = max(
            1, self.limits.logits_mb * 2**20 // (self.vocab * 16)
        )  # logits, noise and scores, float32
        self._law = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        self._keyed_draw = keyed_draw
        if self.device.type == "cuda":  # one fused kernel: the noise of a 152k vocabulary is never stored
            self._keyed_draw = torch.compile(keyed_draw, dynamic=True)
        self._head, self._stop = self.lm_head, None
        self.context, self.limit = check(self)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What passes are computed in: the weights' type, or that of the autocast around the engine."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.model.dtype

    def forward(self, tokens: Sequence[int], layout: Pass) -> Tensor:
        """Final hidden states [N, hidden] of packed tokens. Raises Stopped within `until`."""
        if self._stop is not None and self._stop():
            raise Stopped
        ids = torch.tensor([tokens], device=self.device)
        out = self.decoder(input_ids=ids, position_ids=layout.positions[None], use_cache=False, ragged=layout)
        return out.last_hidden_state[0]

    def draw(
        self, hidden: Tensor, keys: Sequence[int], positions: Sequence[int], targets: Sequence | None = None
    ) -> tuple[list[int], list[float], list, list[float]]:
        """`keyed_draw` of hidden states [N, hidden], as lists; logits exist only chunk by chunk."""
        targets = [0] * len(keys) if targets is None else targets
        columns = [torch.tensor(column, device=hidden.device) for column in (keys, positions, targets)]
        parts = []
        for i in range(0, len(keys), self.scores_per_chunk):
            piece = slice(i, i + self.scores_per_chunk)
            parts.append(self._keyed_draw(self.lm_head(hidden[piece]), *(c[piece] for c in columns), **self._law))
        return tuple(torch.cat(column).tolist() for column in zip(*parts, strict=True))

    def entropy(self, hidden: Tensor) -> list[float]:
        """Entropy in nats of the sampling law after each hidden state [N, hidden]; at temperature 0 that of 1."""
        found: list[float] = []
        for piece in hidden.split(self.scores_per_chunk):
            logp = process_logits(self.lm_head(piece), **self._law).log_softmax(-1)
            found += (-(logp.exp() * logp.clamp(min=-1e4)).sum(-1)).tolist()
        return found

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[RaggedKV, int]:
        """KV of every prompt but its last token, and the tokens this took; equal prompts are computed once."""
        heads = [tuple(prompt[:-1]) for prompt in prompts]
        distinct = {head: i for i, head in enumerate(dict.fromkeys(heads))}
        kv = RaggedKV(len(distinct), max(map(len, distinct)) + 128)
        lengths = list(map(len, distinct))
        for first, last in chunks(lengths, self.limits.tokens_per_pass):
            tokens = [t for head in list(distinct)[first:last] for t in head]
            self.forward(tokens, Pass(kv, first, [0] * (last - first), lengths[first:last], self.device))
        kv.select(torch.tensor([distinct[head] for head in heads], device=self.device))
        return kv, sum(lengths)

    def alone(self, tokens: int) -> Pass:
        """The layout of one text's first `tokens` tokens, which depends on nothing but their number."""
        return Pass(RaggedKV(1, tokens), 0, [0], [tokens], self.device)

    def timing(self, rows: int, tokens: int) -> tuple[int, float]:
        """(tokens, seconds) of a pass of `rows` equal rows, every token drawn: the best of three, after a warm-up."""
        seconds = []
        with self.inference():
            for _ in range(4):
                began = time.perf_counter()
                layout = Pass(RaggedKV(rows, tokens), 0, [0] * rows, [tokens // rows] * rows, self.device)
                self.draw(self.forward([0] * tokens, layout), [0] * tokens, [0] * tokens)
                seconds.append(time.perf_counter() - began)
        return tokens, min(seconds)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Evaluation mode and ragged attention for the time of a rollout; both put back afterwards.

        Raises:
            RolloutError: the model got other layers or another vocabulary since.
        """
        head = self.model.get_output_embeddings()
        if head is not self._head or len(head.weight) != self.vocab or self.model.base_model is not self.decoder:
            raise RolloutError(
                f"{type(self.model).__name__} got another output layer or decoder after the engine was built (with "
                f"{self.vocab} tokens, now {len(head.weight)}). Resize the embeddings first, or build the engine again"
            )
        with self.attention(ATTENTION), evaluation(self.model), torch.inference_mode():
            yield

    @contextmanager
    def until(self, stop: Callable[[], bool]) -> Iterator[None]:
        """Before each pass `stop` is asked; once it says so, what runs here ends without that pass."""
        self._stop = stop
        try:
            with suppress(Stopped):
                yield
        finally:
            self._stop = None

    @contextmanager
    def attention(self, name: str) -> Iterator[None]:
        """Another attention implementation for a while."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(name)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    def two_rows(self, first: Sequence[int], second: Sequence[int], spread: int = 1) -> tuple[Tensor, set[int]]:
        """Packed logits of two texts fed in two passes, and the layers whose attention took part in the second.

        The second pass gives those of first[4:], then of second[1:]. Args: spread: between neighbouring positions.
        """
        kv = RaggedKV(2, 4)
        with self.inference():
            for a, b, starts in ((first[:4], second[:1], [0, 0]), (first[4:], second[1:], [4, 1])):
                layout = Pass(kv, 0, starts, [len(a), len(b)], self.device)
                layout.positions = layout.positions * spread
                hidden = self.forward([*a, *b], layout)
            return self.lm_head(hidden).float(), layout.layers


def chunks(lengths: Sequence[int], tokens_per_pass: int) -> Iterator[tuple[int, int]]:
    """Contiguous ranges of rows whose tokens fit one pass; at least one row with tokens each."""
    first = size = 0
    for i, length in enumerate(lengths):
        if size and size + length > tokens_per_pass:
            yield first, i
            first, size = i, 0
        size += length
    if size:
        yield first, len(lengths)
