"""The engine seam. Engines produce responses, own KV memory and batching, and know nothing of epochs or rewards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from rollout.types import Completion, EngineStats, Request


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampler's law. Drafts and plain decoding share it; the exact rule works on the processed distribution."""

    eos_ids: frozenset[int]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts are verified. `exact` never changes the output; `lenient` is SPEC-RL as published."""

    rule: Literal["exact", "lenient"] = "exact"
    lenience: float = 1.0


class Engine(Protocol):
    """Small enough to fake in 20 lines."""

    weight_version: int

    def generate(self, requests: Sequence[Request]) -> tuple[list[Completion], EngineStats]:
        """One completion per request, in order. Raises RolloutError; never returns a partial batch."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """Loads weights by their Hugging Face names (None: they are shared with the trainer) and sets the version."""

    def reset_cache(self) -> None:
        """Forgets all KV of older weights."""

    def close(self) -> None:
        """Frees what the engine holds; may be called twice."""
