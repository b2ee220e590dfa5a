"""Models of transformers that run packed passes: N tokens of many rows side by side, as a batch of one.

So linear layers see no padding at all; what rows are is a matter of attention (attention.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specrl.rollout.engines.base import Limits, SamplingParams, evaluation
from specrl.rollout.engines.local import padded
from specrl.rollout.engines.local.attention import ATTENTION, Layout
from specrl.rollout.engines.local.draw import Draw
from specrl.rollout.engines.local.kv import KV
from specrl.rollout.engines.local.supported import check
from specrl.rollout.noise import process_logits
from specrl.rollout.types import RolloutError


class Stopped(Exception):
    """The pass was not begun, as the time for it was over."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a pass says about D of its N tokens, once it has run."""

    packed: Tensor
    """int32 [4, N] on the CPU, see `Draw`."""
    hidden: Tensor
    """Final hidden states [N, hidden]."""
    picked: np.ndarray
    """Places of the D tokens among the N."""
    done: torch.cuda.Event | None = None
    """Where the device comes after it has written `packed`."""

    def wait(self) -> tuple[Tensor, Tensor, np.ndarray]:
        """`packed` of the D tokens, hidden states, and where in these those of the D tokens are."""
        if self.done is not None:
            self.done.synchronize()
        whole = len(self.picked) == self.packed.shape[1]
        return self.packed if whole else self.packed[:, self.picked], self.hidden, self.picked


class RaggedModel:
    """A decoder-only causal LM of transformers that runs packed passes.

    Args:
        model: any causal LM whose attention goes through transformers' AttentionInterface.
        sampling: the law that tokens are drawn from.
        limits: memory bounds.
        checked: packed passes are compared with the model's own.

    Raises:
        RolloutError: it is no such model, or it computes what packed passes do not.

    Attributes:
        context: most tokens of a prompt with its response.
        limit: why there are no more, where that is not the model's own limit; else empty.
        kv_bytes: of one position of one row.
        draw: draws behind final hidden states.
    """

    layout: type[Layout] = padded.Pass
    overlaps = False
    """Passes run beside the host."""

    def __init__(
        self, model: torch.nn.Module, sampling: SamplingParams, limits: Limits | None = None, checked: bool = True
    ):
        if not hasattr(model, "base_model") or model.get_output_embeddings() is None:
            raise RolloutError(f"{type(model).__name__} is not a causal LM of transformers, which this engine needs")
        self.model, self.decoder, self.lm_head = model, model.base_model, model.get_output_embeddings()
        self.vocab = self.lm_head.weight.shape[0]
        self.limits = limits or Limits()
        self._law = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        self.draw = Draw(self.lm_head, sampling, self.limits.logits_mb)
        self._head, self._stop = self.lm_head, None
        self.context, self.limit = check(self) if checked else (model.config.max_position_embeddings, "")
        self.kv_bytes = self._kv_bytes()

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What passes are computed in: the weights' type, or that of the autocast around the engine."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.model.dtype

    def kv(self, places: int, capacity: int) -> KV:
        """Room for the keys and values of `places` rows at a time, of up to `capacity` positions each."""
        return KV(places, capacity, self.layout.heads_first)

    def forward(self, tokens: Sequence[int], layout: Layout) -> Tensor:
        """Final hidden states [N, hidden] of packed tokens. Raises Stopped within `until`."""
        self.ask_to_stop()
        return self.decode(layout.ids(tokens), layout)[: len(tokens)]

    def launch(
        self, tokens: Sequence[int], layout: Layout, of_draws: Sequence[np.ndarray], picked: np.ndarray | None = None
    ) -> Drawing:
        """Begins a pass that draws behind its N tokens.

        Args:
            of_draws: int64 [N] each: the noise key of every token's row, the response position that is drawn there, and
                the token that follows in the row's text.
            picked: places of the D tokens behind which draws are wanted; None wants all.
        """
        hidden = self.forward(tokens, layout)
        if picked is not None:
            hidden, of_draws = hidden[torch.from_numpy(picked).to(hidden.device)], [x[picked] for x in of_draws]
        packed = self.draw(hidden, *(torch.from_numpy(x).to(hidden.device) for x in of_draws)).cpu()
        return Drawing(packed, hidden, np.arange(len(hidden)))

    def decode(self, ids: Tensor, layout: Layout) -> Tensor:
        """The decoder's final hidden states [N, hidden] of ids [1, N]."""
        out = self.decoder(input_ids=ids, position_ids=layout.positions[None], use_cache=False, ragged=layout)
        hidden = out.last_hidden_state[0]
        if layout.kv.states is not None:
            layout.kv.states.write(layout.places()[0], hidden)
        return hidden

    def ask_to_stop(self) -> None:
        """Raises Stopped where `until` says so."""
        if self._stop is not None and self._stop():
            raise Stopped

    def entropy(self, hidden: Tensor) -> list[float]:
        """Entropy in nats of the sampling law after each hidden state [N, hidden]; at temperature 0 that of 1."""
        found: list[float] = []
        for piece in hidden.split(self.draw.rows):
            logp = process_logits(self.draw.logits(piece), **self._law).log_softmax(-1)
            found += (-(logp.exp() * logp.clamp(min=-1e4)).sum(-1)).tolist()
        return found

    def alone(self, tokens: int) -> Layout:
        """The layout of one text's first `tokens` tokens, which depends on nothing but their number."""
        return self.layout(KV(1, tokens, self.layout.heads_first), [0], [0], [tokens], self.device)

    def timing(self, rows: int, tokens: int) -> tuple[int, float]:
        """(tokens, seconds) of a pass of `rows` equal rows, every token drawn: the best of three, after a warm-up."""
        seconds, each = [], tokens // rows
        nothing = [np.zeros(tokens, np.int64)] * 3
        with self.inference():
            kv = self.kv(rows, each)
            for _ in range(4):
                began = time.perf_counter()
                layout = self.layout(kv, range(rows), [0] * rows, [each] * rows, self.device)
                self.launch([0] * tokens, layout, nothing).wait()
                seconds.append(time.perf_counter() - began)
        return tokens, min(seconds)

    def _kv_bytes(self) -> int:
        with self.inference():
            layout = self.alone(1)
            self.forward([0], layout)
        return layout.kv.token_bytes

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Evaluation mode and ragged attention for the time of a rollout; all put back afterwards.

        Raises:
            RolloutError: the model got other layers or another vocabulary since.
        """
        head = self.model.get_output_embeddings()
        if head is not self._head or len(head.weight) != self.vocab or self.model.base_model is not self.decoder:
            raise RolloutError(
                f"{type(self.model).__name__} got another output layer or decoder after the engine was built (with "
                f"{self.vocab} tokens, now {len(head.weight)}). Resize the embeddings first, or build the engine again"
            )
        with self.attention(ATTENTION), evaluation(self.model), without_cudnn(), torch.inference_mode():
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
        kv = KV(2, max(len(first), len(second)), self.layout.heads_first)
        with self.inference():
            for a, b, starts in ((first[:4], second[:1], [0, 0]), (first[4:], second[1:], [4, 1])):
                layout = self.layout(kv, [0, 1], starts, [len(a), len(b)], self.device, spread)
                hidden = self.forward([*a, *b], layout)
            return self.lm_head(hidden).float(), layout.layers


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Keeps attention off cuDNN, which plans anew for every shape: tens of milliseconds a pass of growing texts."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


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
