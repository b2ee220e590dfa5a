"""specrl: exact speculative rollouts for LLM post-training. The public names, imported when first used."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import Any

from specrl.run.packages import mixed_roots, package_directories

# trl looks for vLLM's version whenever it is imported, although nothing of ours uses vLLM through it.
warnings.filterwarnings("ignore", message="TRL currently supports vLLM")

# While Python looks for the module of `python -m`, argv[0] is "-m". This must be said before a stranger is imported.
if sys.argv[:1] == ["-m"] and "specrl.env" not in sys.orig_argv and (mixed := mixed_roots(package_directories())):
    print(f"error: {mixed}", file=sys.stderr)
    raise SystemExit(2)

_HOMES = {
    "Config": "specrl.config.schema",
    "EngineSpec": "rollout.engines.base",
    "Fingerprint": "rollout.cache.memory",
    "ReuseRollouts": "trainers.grpo.hook",
    "RolloutConfig": "rollout.config",
    "Row": "rollout.types",
    "SpeculativeRollout": "rollout.speculative",
    "TrajectoryCache": "rollout.cache.memory",
    "build_engine": "rollout.build",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specrl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
