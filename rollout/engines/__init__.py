"""Engines by name. Each is imported only when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module

    from rollout.config import RolloutConfig
    from rollout.engines.base import Engine


def build_engine(model: Module, config: RolloutConfig, eos_ids: frozenset[int]) -> Engine:
    """The engine of `rollout.engine` around the trainer's model, with the run's sampling law and acceptance rule."""
    from rollout.engines.base import Sampling, Speculation
    from rollout.engines.transformers import TransformersEngine

    return TransformersEngine(
        model,
        Sampling(eos_ids, config.temperature, config.top_k, config.top_p),
        Speculation("lenient" if config.acceptance == "lenient" else "exact", config.lenience),
        rows_per_batch=config.rows_per_batch,
        tokens_per_pass=config.tokens_per_pass,
        logits_mb=config.logits_mb,
        tie_margin=config.tie_margin,
        window=config.budget.window,
    )
