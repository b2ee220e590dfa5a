"""What a run needs besides its options: packages, and models that other commands make. No heavy imports."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from specrl.options import ConfigError

if TYPE_CHECKING:
    from specrl.config import Config

HEAD = "the head of the config file may say with what options"


def check(config: Config) -> None:
    """Raises ConfigError for the first thing that is not there, with the command that makes it."""
    for problem in (*packages(config), *drafter(config), *router(config)):
        raise ConfigError(problem)


def packages(config: Config) -> Iterator[str]:
    """What must be installed first."""
    engine, workers, rank = config.rollout.engine, config.cluster.num_workers, config.lora.rank
    wanted = {
        "vllm": (engine == "vllm", f"rollout.engine={engine} needs vLLM", "vllm"),
        "ray": (workers, f"cluster.num_workers={workers} needs Ray", "ray"),
        "peft": (rank, f"lora.rank={rank} needs peft", "peft"),
    }
    for module, (used, why, extra) in wanted.items():
        if used and find_spec(module) is None:
            yield f"{why}. Install it with: pip install 'specrl[{extra}]'"


def drafter(config: Config) -> Iterator[str]:
    """The draft model, which a first command distils."""
    given = config.rollout.drafter
    if given and not given.startswith("layers=") and _absent(given, config.output_dir):
        yield (
            f"rollout.drafter={given} does not exist. Make it first: python -m specrl.drafter out={given} ({HEAD}). "
            "Or take rollout.drafter=layers=N, the policy's own first layers."
        )


def router(config: Config) -> Iterator[str]:
    """The learned router or judge of a lossy law."""
    law = config.rollout.law
    if law not in ("judged", "routed"):
        return
    by, path = getattr(config.rollout, law).by, getattr(config.rollout, law).path
    maker = {"arbitrage": "train_router", "judge": "train_judge"}.get(by)
    if maker and _absent(path, config.output_dir, hub=False):
        yield (
            f"rollout.{law}.path={path} does not exist, which rollout.{law}.by={by} asks. Make it first: "
            f"python -m specrl.{maker} config={config.name} out={path} ({HEAD})."
        )


def _absent(given: str, output_dir: str, hub: bool = True) -> bool:
    """True for a directory that is not there. Args: hub: `given` may also be the name of a model on a hub."""
    path = Path(given).expanduser()
    if path.is_dir():
        return False
    ours = any(path.is_relative_to(folder) for folder in (output_dir, "outputs"))
    return not hub or ours or given.startswith((".", "~", "/")) or given.count("/") != 1 or path.parent.is_dir()
