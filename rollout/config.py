"""Configuration of the rollout stage. No heavy imports: `help=true` must answer in about a second."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


def doc(default, help: str):
    """A dataclass field with its one-line documentation, shown by `help=rollout` and in docs/configuration.md."""
    make = {"default_factory": lambda: type(default)(default)} if isinstance(default, list) else {"default": default}
    return field(**make, metadata={"help": help})


@dataclass
class CacheConfig:
    max_mb: int = doc(512, "memory bound of stored trajectories in MB (2^20 bytes); the least recently used go first")
    start_from: str = doc("", "directory of trajectories to start with, such as an earlier run's `trajectories`")
    clear: bool = doc(False, "resume with an empty cache instead of the checkpoint's")
    on_write_error: Literal["warn", "stop"] = doc(
        "warn", "when the cache cannot be written: go on without saving, or stop"
    )


@dataclass
class BudgetConfig:
    window: int = doc(0, "draft tokens a row carries in one pass; 0 decides from measured costs and acceptance")
    rematch: int = doc(5, "tokens that must agree to pick up a draft whose positions have shifted; 0 never re-matches")


@dataclass
class RolloutConfig:
    engine: Literal["transformers"] = doc("transformers", "inference engine")
    acceptance: Literal["exact", "lenient", "off"] = doc(
        "exact", "exact: bit-identical to plain decoding; lenient: SPEC-RL as published, biased; off: plain decoding"
    )
    replay: float = doc(
        0.0, "share of slots that keep their noise key from their last visit, 0 to 1 (see docs/guarantees.md)"
    )
    lenience: float = doc(
        1.0, "factor l of the published acceptance min(1, l*p_new/p_old); only for acceptance=lenient"
    )
    group_size: int = doc(8, "responses per prompt")
    temperature: float = doc(1.0, "sampling temperature; 0 is greedy")
    top_p: float = doc(1.0, "nucleus sampling mass; 1 is off")
    top_k: int = doc(0, "sample from the k most likely tokens; 0 is off")
    max_new_tokens: int = doc(256, "response cap in tokens, EOS included")
    rows_per_batch: int = doc(256, "rows decoded together, bounds KV memory; more rows run in further batches")
    tokens_per_pass: int = doc(4096, "most tokens in one forward pass; bounds verification memory")
    logits_mb: int = doc(256, "most memory for logits and noise at a time, in MB; larger passes are scored in chunks")
    tie_margin: float = doc(
        1e-4, "draws whose two best scores are closer than this are decided by a canonical pass; fp32 only, 0 is off"
    )
    measure_every: int = doc(
        10,
        "every N steps also roll out plainly with the same keys, to measure spec/speedup and compare tokens; 0 never",
    )
    cache: CacheConfig = field(default_factory=CacheConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
