"""Configuration of the rewards. No heavy imports: `help=true` must answer in about a second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal


def doc(default: Any, help: str, *, low: float = 0, high: float = inf, resume: str = "") -> Any:
    """A dataclass field with its documentation: `specrl.rollout.sections.doc`, which the rewards must not import."""
    make = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**make, metadata={"help": help, "limits": (low, high), "resume": resume})


@dataclass
class RewardConfig:
    functions: list[str] = doc(["math"], "rewards to add up: math, format, or your own function as module:attribute")
    weights: list[float] = doc(
        [], "one weight per function; empty means 1 each, 0 logs a reward without training on it"
    )
    timeout_s: float = doc(5.0, "wall-clock deadline for one answer in a reward worker", resume="free")
    memory_mb: int = doc(
        2048, "address-space limit of one reward worker, in MB (2^20 bytes); 0 is no limit", resume="free"
    )
    workers: int = doc(1, "killable worker processes per reward that needs them", low=1, resume="free")
    start_timeout_s: float = doc(
        300.0, "wall-clock deadline for the start of a reward worker, which is mostly imports", low=1, resume="free"
    )
    on_limit: Literal["mask", "zero"] = doc(
        "mask", "reward of a text over timeout_s or memory_mb in workers that answer others: none, or 0"
    )
    max_failure_ratio: float = doc(
        0.05,
        "stop when the scoring of more than this share of rows fails; 0: at the first, 1: never",
        high=1,
        resume="free",
    )
    isolate_user: bool = doc(
        True, "run your own functions in workers, one sample a call; false: in the trainer, no deadline"
    )

    def problems(self) -> Iterator[str]:
        """Sentences about options that contradict each other or are of no use."""
        if not self.functions:
            yield "reward.functions=[] scores nothing. Try reward.functions=[math]."
        given = f"reward.weights=[{','.join(map(str, self.weights))}]"
        if self.weights and len(self.weights) != len(self.functions):
            near = (self.weights + [1.0] * len(self.functions))[: len(self.functions)]
            yield (
                f"{given} has {len(self.weights)} numbers for {len(self.functions)} functions "
                f"[{','.join(self.functions)}]. Try reward.weights=[{','.join(map(str, near))}]."
            )
        if not all(map(isfinite, self.weights)):
            yield f"{given} must be finite numbers."
        if self.timeout_s == 0:
            yield "reward.timeout_s=0 leaves no time to score. Try reward.timeout_s=5."
