"""Costs of drafters' passes: on the machines of `benchmarks.research.budget`, and measured at a real vocabulary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from benchmarks.research.budget import MACHINES
from benchmarks.research.int8_copy import Int8Linear
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.probe import packed_model
from specrl.rollout.noise import keyed_sample

LAYERS, LAYER, HEAD, TRIMMED, LAUNCH = 28, 0.25, 0.62, 0.13, 0.05
"""A 7B policy on the simulated gpu: layers, and milliseconds of a layer's weights, the head's, those of 32k ids in the
head, and of launching a pass."""
LAYER_TOKEN, HEAD_TOKEN = 0.001, 0.0024  # milliseconds that a token computes
VOCABULARY, HIDDEN, DEPTH = 151_936, 896, 24  # Qwen2.5-0.5B
SHAPES = ((896, 896), (896, 128), (896, 128), (896, 896), (896, 4864), (896, 4864), (4864, 896))  # of a layer of it
TOKENS = (1, 2, 4, 8, 16, 64, 256)  # of the passes that are measured
Work = Callable[[], object]


@dataclass(frozen=True)
class Pass:
    """Milliseconds of passes: fixed + row * rows + (token + place * width) * tokens + score * scored tokens."""

    fixed: float
    row: float
    token: float
    place: float = 0.0
    score: float = 0.0

    def __call__(self, rows: np.ndarray, tokens: np.ndarray, width: np.ndarray, scored: np.ndarray) -> np.ndarray:
        return self.fixed + self.row * rows + (self.token + self.place * width) * tokens + self.score * scored


@dataclass(frozen=True)
class Measured:
    """The same from milliseconds measured at `TOKENS`: of the layers by tokens, of head and draw by scored tokens."""

    layers: Sequence[float]
    scored: Sequence[float]

    def __call__(self, rows: np.ndarray, tokens: np.ndarray, width: np.ndarray, scored: np.ndarray) -> np.ndarray:
        return _between(tokens, self.layers) + _between(scored, self.scored)


def on_gpu(layers: int, bits: int = 16, trimmed: bool = False) -> Pass:
    """A drafter of the 7B's width; its head stays in bf16."""
    fixed = LAUNCH + layers * LAYER * bits / 16 + (TRIMMED if trimmed else HEAD)
    score = HEAD_TOKEN * (TRIMMED / HEAD if trimmed else 1)
    return Pass(fixed, MACHINES["gpu"][1] * layers / LAYERS, layers * LAYER_TOKEN, score=score)


def on_cpu(policy: nn.Module, drafter: nn.Module) -> Pass:
    """A drafter beside the embedded policy: that machine's costs times the ratios of the processor's time here."""
    fixed, row, token, place = MACHINES["cpu"]
    theirs, ours = _pass_ms(policy), _pass_ms(drafter)
    layers = drafter.config.num_hidden_layers
    first, more = (b / a for a, b in zip(theirs, ours, strict=True))
    return Pass(fixed * first, row * first, token * more, place * layers / policy.config.num_hidden_layers)


def parts(kept: int, repeats: int = 5) -> dict[str, list[float]]:
    """Milliseconds on one thread at `TOKENS` of: a layer in float32 and in int8, head, draw, and both on `kept` ids."""
    stacks = [nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in SHAPES) for _ in range(4)]  # more than caches hold
    small = [nn.ModuleList(map(Int8Linear, stack)) for stack in stacks]
    head, ids = nn.Linear(HIDDEN, VOCABULARY, bias=False), torch.arange(kept, dtype=torch.int32) * (VOCABULARY // kept)
    cut = nn.Linear(HIDDEN, kept, bias=False)
    cut.weight.data = head.weight.data[ids].contiguous()
    names = ("layer", "int8 layer", "head", "draw", "cut head", "cut draw")
    found: dict[str, list[float]] = {name: [] for name in names}
    with torch.inference_mode():
        for count in TOKENS:
            x = {size: torch.randn(count, size) for size in (HIDDEN, 4864)}
            keys, places = torch.arange(count) * 7919, torch.arange(count)
            logits, few = head(x[HIDDEN]), cut(x[HIDDEN])
            works = {
                "layer": lambda x=x: [lin(x[lin.in_features]) for stack in stacks for lin in stack],
                "int8 layer": lambda x=x: [lin(x[lin.in_features]) for stack in small for lin in stack],
                "head": lambda x=x: head(x[HIDDEN]),
                "draw": lambda z=logits, k=keys, p=places: keyed_sample(z, k, p),
                "cut head": lambda x=x: cut(x[HIDDEN]),
                "cut draw": lambda z=few, k=keys, p=places: keyed_sample(z, k, p, ids=ids),
            }
            for name, ms in _best(works, repeats).items():
                found[name].append(ms / (len(stacks) if "layer" in name else 1))
    return found


def on_half_billion(found: dict[str, list[float]], layers: int, small: bool = False, trimmed: bool = False) -> Measured:
    """A model of so many layers at this width, of `parts`. Args: small: layers in int8."""
    head = np.add(*(found[f"cut {part}" if trimmed else part] for part in ("head", "draw")))
    return Measured([layers * ms for ms in found["int8 layer" if small else "layer"]], head.tolist())


def _pass_ms(model: nn.Module) -> tuple[float, float]:
    """Milliseconds of the processor for the engine's pass over one token, and for each token of one over 256."""
    packed = packed_model(model, SamplingParams(frozenset()))
    works = {count: lambda count=count: packed.timing(1, count) for count in (1, 256)}
    with torch.inference_mode():
        one, many = _best(works, 8).values()
    return one, (many - one) / 255


def _best(works: dict, repeats: int) -> dict:
    """Least milliseconds of the processor that each took, in turns."""
    least = dict.fromkeys(works, float("inf"))
    for _ in range(repeats + 1):
        for name, work in works.items():
            began = time.process_time()
            work()
            least[name] = min(least[name], 1e3 * (time.process_time() - began))
    return least


def _between(tokens: np.ndarray, ms: Sequence[float]) -> np.ndarray:
    """Linear between the measured points, and on beyond the last."""
    slope = (ms[-1] - ms[-2]) / (TOKENS[-1] - TOKENS[-2])
    return np.interp(tokens, TOKENS, ms) + slope * np.maximum(0, tokens - TOKENS[-1])
