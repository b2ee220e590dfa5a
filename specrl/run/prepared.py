"""What other commands make before a run can use it: draft models, routers and judges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from specrl.run import policy

if TYPE_CHECKING:
    from specrl.config.schema import Config

HEAD = "the head of the config file may say with what options"


def missing(config: Config) -> Iterator[str]:
    """Sentences about what is not there or cannot be loaded, with the command that makes it."""
    yield from _drafter(config)
    yield from _learned(config)


def _drafter(config: Config) -> Iterator[str]:
    """The draft model, which a first command distils; a new head needs no command."""
    given = config.rollout.drafter
    if given in ("", "head"):
        return
    if _absent(given, config.output_dir):
        yield f"rollout.drafter={given} does not exist. Make it first: python -m specrl.drafter out={given} ({HEAD})."
    elif policy.is_path(given) and (flaw := policy.flaw(Path(given).expanduser())):
        yield f"rollout.drafter={given} cannot be loaded: {flaw}."


def _learned(config: Config) -> Iterator[str]:
    """The learned router or judge of a lossy law."""
    law = config.rollout.acceptance
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
    return not hub or ours or "/" not in given or policy.is_path(given)
