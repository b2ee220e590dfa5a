"""The options `reward.*`. This module imports nothing heavy: `help=true` must answer in about a second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal


def doc(default: Any, help: str, *, low: float = 0) -> Any:
    """As `doc` of rollout/sections.py, which the rewards do not depend on."""
    metadata = {"help": help, "limits": (low, inf)}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class RewardConfig:
    functions: list[str] = doc(["math"], "rewards to add up: math, code, format, or your function as module:attribute")
    weights: list[float] = doc([], "weight of each function; empty is 1 each, 0 only logs it")
    thinking_tags: list[str] = doc(
        ["<think>", "</think>"], "tags around the thoughts of a response, which are no answer; empty if it has none"
    )
    timeout_s: float = doc(5.0, "seconds for one answer of a reward worker")
    memory_mb: int = doc(2048, "address-space limit of a reward worker in MB; 0 is none")
    workers: int = doc(1, "worker processes per reward that needs them", low=1)
    on_limit: Literal["mask", "zero"] = doc(
        "mask", "reward of a response whose text exceeds timeout_s or memory_mb: none, or 0"
    )

    def problems(self) -> Iterator[str]:
        """Messages for options of no use."""
        weights = f"reward.weights=[{','.join(map(str, self.weights))}]"
        if not self.functions:
            yield "reward.functions=[] scores nothing. Try reward.functions=[math]."
        if self.weights and len(self.weights) != len(self.functions):
            near = (self.weights + [1.0] * len(self.functions))[: len(self.functions)]
            yield (
                f"{weights} has {len(self.weights)} numbers for {len(self.functions)} functions "
                f"[{','.join(self.functions)}]. Try reward.weights=[{','.join(map(str, near))}]."
            )
        if not all(map(isfinite, self.weights)):
            yield f"{weights} must be finite numbers."
        if len(self.thinking_tags) not in (0, 2) or not all(self.thinking_tags):
            yield (
                f"reward.thinking_tags=[{','.join(self.thinking_tags)}] must be an opening and a closing tag. Try "
                "reward.thinking_tags=[<think>,</think>], or [] for a model that writes no thoughts."
            )
        if self.timeout_s == 0:
            yield "reward.timeout_s=0 leaves no time to score. Try reward.timeout_s=5."
