"""The engine interface. Engines generate responses and manage KV memory and batching."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from specrl.rollout.config import RolloutConfig
from specrl.rollout.types import AheadText, Completion, EngineStats, Request, RolloutError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling params of drafts and plain decoding alike; they define the distribution that tokens are sampled from.

    Raises:
        RolloutError: a value defines no distribution.
    """

    eos_ids: frozenset[int]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def terms(self) -> tuple[float, int, float]:
        """Temperature, top-k and top-p, in the order of the sampling kernels."""
        return float(self.temperature), self.top_k, float(self.top_p)

    def __post_init__(self):
        whole = isinstance(self.top_k, Integral) and self.top_k >= 0
        if not (whole and 0 <= self.temperature < math.inf and 0 < self.top_p <= 1):
            raise RolloutError(
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}: expected a temperature of at "
                "least 0, a whole top_k of at least 0 (0 keeps all) and a top_p above 0, up to 1"
            )


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Everything an engine is built from, here or in a worker process."""

    eos_ids: frozenset[int]
    rollout: RolloutConfig
    model: str = ""
    """Directory or hub id of the model, for engines that load their own."""
    dtype: str = "float32"
    device: str = "cpu"
    revision: str = ""
    trust_remote_code: bool = False
    tokenizer: str = ""
    """Directory or hub id; empty takes the model's. Only routers need text."""

    def load(self, source: str) -> PreTrainedModel:
        """The model, or another one of its dtype, in evaluation mode. Raises what transformers raises."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=getattr(torch, self.dtype),
            revision=(self.revision or None) if source == self.model else None,
            trust_remote_code=self.trust_remote_code,
        )
        return model.eval().to(self.device)


NO_WEIGHTS = "this engine holds its own weights; an update has to bring them"
OUTLIER = 4.0
DRAFTER = "drafter."
"""Prefix of a draft model's weights, which may follow the policy's in an update."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A text with the trainer's log-probs, to check that an engine has the weights that it was sent."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of `tokens[1:]`, each given the tokens before it, at temperature 1."""
    tolerance: float
    """Largest difference that rounding explains, in nats: of every token, or of their mean where there are outliers."""
    outliers: float = 0.0
    """Share of tokens that may differ by more than OUTLIER tolerances, which happens occasionally in bfloat16."""

    def check(self, logprobs: Sequence[float], version: int) -> None:
        """Compares the engine's log-probs of the same text.

        Raises:
            RolloutError: the two differ; the engine must not generate with these weights.
        """
        if len(logprobs) != len(self.logprobs):
            raise RolloutError(f"the engine scored {len(logprobs)} of {len(self.logprobs)} probe tokens")
        gaps = [abs(a - b) for a, b in zip(logprobs, self.logprobs, strict=True)]
        if self.outliers:
            measure = "on average"
            most = sum(gaps) / len(gaps)
            far = sum(gap > OUTLIER * self.tolerance for gap in gaps) / len(gaps)
        else:
            measure = "up to"
            most = max(gaps, key=lambda gap: (gap != gap, gap))
            far = 0.0
        if not (most <= self.tolerance and far <= self.outliers):  # NaN fails too
            tokens = f", and {far:.0%} of the tokens by more than {OUTLIER * self.tolerance:.3g}" if far else ""
            raise RolloutError(
                f"at weight version {version} the engine's log-probs differ from the trainer's by {measure} "
                f"{most:.3g} nats (allowed {self.tolerance:.3g}){tokens}: it does not run the weights it was sent, or "
                "does not compute what the trainer's model computes"
            )


@contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every sub-module has its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Python's garbage collector ignores the objects that exist already; new ones are collected as usual.

    It would walk all of a trainer's objects about once in a rollout of many rows, which takes as long as many passes.
    Nothing is done if objects are frozen already, as they would be unfrozen here.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def out_of_memory(error: Exception) -> bool:
    """True for what torch and Python raise when memory runs out."""
    words = ("out of memory", "not enough memory", "allocate memory")  # CUDA, Windows and Linux
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )


def free_bytes(device: torch.device) -> int:
    """Memory that a rollout may take now: of a GPU with what torch holds in reserve; for a CPU of the machine, or what
    the container's limit leaves if that is less."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    import psutil

    return min(psutil.virtual_memory().available, container_bytes())


def container_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that the container's limit leaves, sys.maxsize without one. File cache that can be dropped is free.

    Args: root: where the container's control group (version 2 or 1) is mounted.
    """
    versions = ("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    for limit, used in versions:
        try:
            left = int((root / limit).read_text()) - int((root / used).read_text())
            statistics = (root / limit).with_name("memory.stat").read_text().split()
        except (OSError, ValueError):  # another version, or "max"
            continue
        counts = dict(zip(statistics[::2], statistics[1::2], strict=True))
        return left + int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
    return sys.maxsize


class Engine(Protocol):
    """Generates responses with the weights that it was sent."""

    own_weights: bool
    """False: it runs the trainer's own model, and `update_weights` takes None."""

    @property
    def weight_version(self) -> int:
        """Of the last update; 0 before."""

    def generate(self, requests: Sequence[Request]) -> tuple[list[Completion], EngineStats]:
        """One completion per request, in order. Raises RolloutError; never returns a partial batch."""

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]] | None, version: int, probe: Probe | None = None
    ) -> None:
        """Loads weights by their Hugging Face names, sets the version, drops older KV and checks the probe.

        Names and shapes are compared before anything is loaded where the weights can be looked at twice (a Source, or
        a collection), else as they come. After a failure an engine with its own weights refuses to generate until an
        update succeeds.

        Raises RolloutError when the version goes backwards, a weight is missing or does not fit, an engine with its own
        weights gets none, or the probe differs.
        """

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-prob of each of `tokens[1:]` given the tokens before it, at temperature 1, under the engine's weights."""

    def close(self) -> None:
        """Frees what the engine holds; may be called twice."""


class Meta(NamedTuple):
    """A weight that an update will bring."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@runtime_checkable
class Source(Protocol):
    """Weights that can be walked again, with the same values until the next update. What vLLM calls a WeightSource."""

    collective: bool
    """Every training process has to walk at the same time, as each holds a part."""

    def metadata(self) -> list[Meta]:
        """The weights that walking yields, in that order; nothing is gathered, merged or copied."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor), one at a time."""


@runtime_checkable
class HoldsSessions(Protocol):
    """An Engine whose calls share work within a `with` block: KV of their common beginnings, memory that it holds."""

    def session(self, requests: Sequence[Request], beside: Engine | None = None) -> AbstractContextManager[None]:
        """The weights do not change within the block, whose calls continue these requests.

        Args: beside: holds a session of the same requests at the same time, in the same memory.
        """


@runtime_checkable
class WorksAhead(Protocol):
    """An Engine that can also roll out announced rows ahead, in the time between its calls."""

    not_ahead: str
    """Why it cannot; empty if it can."""
    how_ahead: str
    """A clause that says which of its resources does so."""

    def begin(self, requests: Sequence[Request]) -> None:
        """Rolls these out as far as possible, replacing what was begun before: on the workers that the next calls of
        `generate` leave idle, and after these calls; or in the next call's passes."""

    def stop(self) -> tuple[dict[int, AheadText], float]:
        """Stops that within a pass; returns the texts so far by noise key, and the worker seconds that they took."""
