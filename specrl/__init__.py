"""specrl: exact speculative rollouts for LLM post-training. The public names, imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "Config": "specrl.config",
    "EngineSpec": "rollout.engines",
    "Fingerprint": "rollout.cache",
    "ReuseRollouts": "trainers.hook",
    "RolloutConfig": "rollout.config",
    "Row": "rollout.types",
    "SpeculativeRollout": "rollout.speculative",
    "TrajectoryCache": "rollout.cache",
    "build_engine": "rollout.engines",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specrl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
