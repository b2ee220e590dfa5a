"""Causal LMs of transformers that run packed passes: the new tokens of many rows, side by side, as a batch of one.

Linear layers see no padding; only attention knows rows. A layout says which token belongs to which row and runs the
attention: `padded.PaddedPass` on CPUs and in float32, `varlen.StaticPass` on GPUs. Both write each token's key and
value into its row's slab of KV memory, so rolling back rejected tokens only shortens the row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import SamplingParams, evaluation
from specrl.rollout.engines.local.kv import KV
from specrl.rollout.engines.local.padded import PaddedPass
from specrl.rollout.engines.local.sampler import Sampler
from specrl.rollout.engines.local.varlen import StaticPass
from specrl.rollout.types import RolloutError

Layout = PaddedPass | StaticPass
"""Which rows the tokens of one pass belong to, and how attention runs over them."""
ATTENTION = "specrl_packed"
_KNOWN = {"sliding_window", "position_ids", "is_causal", "use_cache", "output_attentions"}


class Stopped(Exception):
    """The pass was not begun because `until` asked to stop."""


@dataclass(slots=True)
class InFlightPass:
    """A pass that was launched and whose samples were not read yet."""

    samples: Tensor
    """int32 [4, N] on the CPU, see `Sampler`."""
    hidden: Tensor
    """Final hidden states [N, hidden]."""
    picked: np.ndarray
    """Indices of the D tokens among the N whose samples are wanted."""
    done: torch.cuda.Event | None = None
    """Recorded on the device after the copy of `samples`."""
    feed: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """New tokens by row."""
    positions: list[int] = field(default_factory=list)
    """Response position of each row's first sample."""
    spans: list[int] = field(default_factory=list)
    """Index of each row's first sample, and the number of all samples."""
    width: int = 0
    """Positions of the longest row."""
    began: float = 0.0
    launch_s: float = 0.0
    asking_s: float | None = None
    """Seconds that asking for the drafts of this pass took; None if no drafter was asked."""

    def wait(self) -> Tensor:
        """Samples int32 [4, D], once the device has written them."""
        if self.done is not None:
            self.done.synchronize()
        return self.samples if len(self.picked) == self.samples.shape[1] else self.samples[:, self.picked]


class PackedModel:
    """A decoder-only causal LM of transformers that runs packed passes; `probe.packed_model` builds and checks one.

    Args:
        model: any causal LM whose attention goes through transformers' AttentionInterface.
        sampling: the sampling params.
        limits: memory bounds.

    Raises:
        RolloutError: it is no causal LM of transformers.

    Attributes:
        context: most tokens of a prompt with its response.
        limit: why `context` is below the model's own; empty where it is not.
        sampler: samples tokens from final hidden states.
    """

    layout: type[Layout] = PaddedPass
    overlaps = False
    """Passes run on the device while the host goes on."""

    def __init__(self, model: PreTrainedModel, sampling: SamplingParams, limits: RolloutConfig | None = None):
        if not hasattr(model, "base_model") or model.get_output_embeddings() is None:
            raise RolloutError(f"{type(model).__name__} is not a causal LM of transformers, which this engine needs")
        self.model = model
        self.decoder = model.base_model
        self.lm_head: torch.nn.Linear = model.get_output_embeddings()
        self._original_head = self.lm_head
        self.vocab = self.lm_head.weight.shape[0]
        self.limits = limits or RolloutConfig()
        self.sampler = Sampler(self.lm_head, sampling)
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        self.limit = ""
        self._stop: Callable[[], bool] | None = None

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What passes are computed in: the weights' type, or that of the autocast around the engine."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.model.dtype

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of KV memory for one position of one row."""
        with self.inference():
            layout = self.single_row(1)
            self.forward([0], layout)
        return layout.kv.token_bytes

    def kv(self, slabs: int, capacity: int) -> KV:
        """KV memory for `slabs` rows at a time, of up to `capacity` positions each."""
        return KV(slabs, capacity, self.layout.heads_first)

    def forward(self, tokens: Sequence[int] | np.ndarray, layout: Layout) -> Tensor:
        """Final hidden states [N, hidden] of packed tokens. Raises Stopped within `until`."""
        self.check_stop()
        return self.decode(layout.ids(tokens), layout)[: len(tokens)]

    def launch(
        self,
        tokens: Sequence[int] | np.ndarray,
        layout: Layout,
        noise: Sequence[np.ndarray],
        picked: np.ndarray | None = None,
    ) -> InFlightPass:
        """Begins a pass that samples a token after each of its N tokens.

        Args:
            noise: int64 [N] each: the noise key of every token's row, the response position that is sampled there, and
                the token that follows in the row's text.
            picked: indices of the D tokens whose samples are wanted; None wants all.
        """
        hidden = self.forward(tokens, layout)
        if picked is not None:
            hidden = hidden[torch.from_numpy(picked).to(hidden.device)]
            noise = [x[picked] for x in noise]
        samples = self.sampler(hidden, *(torch.from_numpy(x).to(hidden.device) for x in noise)).cpu()
        return InFlightPass(samples, hidden, np.arange(len(hidden)))

    def decode(self, ids: Tensor, layout: Layout) -> Tensor:
        """The decoder's final hidden states [N, hidden] of ids [1, N]."""
        out = self.decoder(input_ids=ids, position_ids=layout.positions[None], use_cache=False, layout=layout)
        hidden = out.last_hidden_state[0]
        if layout.kv.states is not None:
            layout.kv.states.write(layout.slot_mapping(), hidden)
        return hidden

    def check_stop(self) -> None:
        """Raises Stopped where the `stop` of `until` returns true."""
        if self._stop is not None and self._stop():
            raise Stopped

    def single_row(self, tokens: int) -> Layout:
        """The layout of the first `tokens` tokens of one text, whose shape depends on their number alone."""
        return self.layout(KV(1, tokens, self.layout.heads_first), [0], [0], [tokens], self.device)

    def timing(self, rows: int, tokens: int) -> tuple[int, float]:
        """(tokens, seconds) of a pass of `rows` equal rows, every token sampled: the best of three, after a warm-up."""
        seconds = []
        length = tokens // rows
        noise = [np.zeros(tokens, np.int64)] * 3
        with self.inference():
            kv = self.kv(rows, length)
            for _ in range(4):
                began = time.perf_counter()
                layout = self.layout(kv, range(rows), [0] * rows, [length] * rows, self.device)
                self.launch([0] * tokens, layout, noise).wait()
                seconds.append(time.perf_counter() - began)
        return tokens, min(seconds)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Evaluation mode and packed attention for the time of a rollout; both are restored afterwards.

        Raises:
            RolloutError: the model has got other layers or another vocabulary since the engine was built.
        """
        head = self.model.get_output_embeddings()
        replaced = head is not self._original_head or self.model.base_model is not self.decoder
        if replaced or len(head.weight) != self.vocab:
            raise RolloutError(
                f"{type(self.model).__name__} got another output layer or decoder after the engine was built (with "
                f"{self.vocab} tokens, now {len(head.weight)}). Resize the embeddings first, or build the engine again"
            )
        with self.attention(ATTENTION), evaluation(self.model), without_cudnn(), torch.inference_mode():
            yield

    @contextmanager
    def until(self, stop: Callable[[], bool]) -> Iterator[None]:
        """`stop` is asked before each pass; once it returns true, the block ends without that pass."""
        self._stop = stop
        try:
            with suppress(Stopped):
                yield
        finally:
            self._stop = None

    @contextmanager
    def attention(self, name: str) -> Iterator[None]:
        """Another attention implementation within the block."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(name)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model, or that inside a peft model, which has the layers of its adapters."""
    inner = getattr(model, "get_base_model", None)
    return inner() if inner else model


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
            first = i
            size = 0
        size += length
    if size:
        yield first, len(lengths)


def packed_attention(module, query, key, value, attention_mask, scaling=None, layout: Layout | None = None, **kwargs):
    """Attention of packed passes, with the signature of transformers' AttentionInterface.

    query [1, heads, N, dim], key and value [1, kv_heads, N, dim]; returns ([1, N, heads, dim], None).

    Raises:
        RolloutError: the model asks for something that is not computed here.
    """
    unknown = [name for name, value in kwargs.items() if name not in _KNOWN and _is_on(value)]
    if attention_mask is not None:
        unknown.append("a mask of its own")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown.append("tokens that see later ones")
    if layout is None:
        raise RolloutError(f"its layers do not pass their keyword arguments on to {type(module).__name__}")
    if module.layer_idx in layout.layers:
        unknown.append("to run twice in a pass")
    if unknown:
        wanted = " and ".join(unknown)
        raise RolloutError(
            f"its attention ({type(module).__name__}) asks for {wanted}, which packed passes do not have"
        )
    layout.layers.add(module.layer_idx)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = layout.attend(module.layer_idx, query[0], key[0], value[0], kwargs.get("sliding_window"), scaling)
    return out[None], None


AttentionInterface.register(ATTENTION, packed_attention)


def _is_on(value: object) -> bool:
    """False for an argument that is left out or off: None, False or 0, such as a dropout of 0."""
    return value is not None and not (isinstance(value, (bool, int, float)) and not value)
