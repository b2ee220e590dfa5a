"""specrl: exact speculative rollouts for LLM post-training. Public names are imported on first use."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

if not Path(__file__).with_name("rollout").is_dir():
    raise ImportError(
        "specrl/rollout, specrl/reward, specrl/trainers and specrl/configs are links, and git has made files of them. "
        "Clone again with `git clone -c core.symlinks=true`, or install a wheel."
    )
# TRL checks vLLM's version whenever it is imported, although specrl does not use vLLM through TRL.
warnings.filterwarnings("ignore", message="TRL currently supports vLLM")

_HOMES = {
    "CacheConfig": "specrl.rollout.sections",
    "Config": "specrl.config.schema",
    "EngineSpec": "specrl.rollout.engines.base",
    "Fingerprint": "specrl.rollout.cache.memory",
    "RolloutConfig": "specrl.rollout.config",
    "Row": "specrl.rollout.types",
    "SpeculativeRollout": "specrl.rollout.speculative",
    "TrajectoryCache": "specrl.rollout.cache.memory",
    "build_engine": "specrl.rollout.build",
    "reusing": "specrl.trainers.grpo.reusing",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specrl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
