"""Configuration of the rewards. No heavy imports: `help=true` must answer in about a second."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class RewardConfig:
    functions: list[str] = field(
        default_factory=lambda: ["math"],
        metadata={"help": "rewards to add up: math, format, or your own function as module:attribute"},
    )
    weights: list[float] = field(
        default_factory=list,
        metadata={"help": "one weight per function; empty means 1 each, 0 logs a reward without training on it"},
    )
    timeout_s: float = field(default=5.0, metadata={"help": "wall-clock deadline for one answer in a reward worker"})
    memory_mb: int = field(
        default=2048, metadata={"help": "address-space limit of one reward worker, in MB (2^20 bytes); 0 is no limit"}
    )
    workers: int = field(default=1, metadata={"help": "killable worker processes per reward that needs them"})
    start_timeout_s: float = field(
        default=300.0,
        metadata={"help": "wall-clock deadline for the start of a reward worker, which is mostly imports"},
    )
    on_limit: Literal["mask", "zero"] = field(
        default="mask",
        metadata={"help": "reward of a text over timeout_s or memory_mb in workers that answer others: none, or 0"},
    )
    max_failure_ratio: float = field(
        default=0.05,
        metadata={"help": "stop when the scoring of more than this share of rows fails; 0: at the first, 1: never"},
    )
    isolate_user: bool = field(
        default=True,
        metadata={"help": "run your own functions in workers, one sample a call; false: in the trainer, no deadline"},
    )
