"""What a run goes on from: the checkpoint and texts of its beginning, its data, and how the machine rounded there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrl.config import load as cli
from specrl.config.changes import same_settings
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
from specrl.rollout.cache.reading import load
from specrl.trainers.checkpoint import step_of, trajectories
from specrl.trainers.resuming import leave_aside, newest

if TYPE_CHECKING:
    import torch


def sound(config: Config, saved: Path, checkpoints: Path) -> Path | None:
    """The checkpoint that a run goes on from; None where it was not saved yet.

    Args: saved: its config.yaml.

    Raises: ConfigError, CheckpointError.
    """
    same_settings(cli.load_saved(saved), config)
    text_decides = config.rollout.accepts_old_text and not config.rollout.cache.clear
    if found := newest(checkpoints, text_decides=text_decides):
        leave_aside(checkpoints, found)
    return found


def stored(
    config: Config, mark: Fingerprint, vocabulary: int, eos_ids: frozenset[int], checkpoint: Path | None
) -> TrajectoryCache:
    """The trajectory cache of a checkpoint, or else of `rollout.cache.start_from`. Raises ConfigError, CacheError."""
    # that of a checkpoint may be missing, as after `off`: the cache is then empty
    start = trajectories(checkpoint) if checkpoint else Path(config.rollout.cache.start_from)
    if not checkpoint and not start.is_dir():
        raise ConfigError(f"the trajectory cache {start} does not exist. Check rollout.cache.start_from.")
    return load(
        start,
        mark,
        vocabulary,
        eos_ids,
        max_step=step_of(checkpoint) if checkpoint else None,
        max_mb=config.rollout.cache.max_mb,
        check_sampling=config.rollout.acceptance == "lenient",
        new_run=not checkpoint,
    )


def agreed(checkpoint: Path | None, run_dir: Path, device: torch.device) -> Path | None:
    """The checkpoint that the first process found, in every process of the run."""
    import torch
    from accelerate import PartialState
    from accelerate.utils import broadcast

    own = PartialState(cpu=device.type == "cpu").device
    step = broadcast(torch.tensor(step_of(checkpoint) if checkpoint else -1, device=own)).item()
    return None if step < 0 else run_dir / "checkpoints" / f"checkpoint-{step}"


def same_data(began: Mapping[str, str], now: Mapping[str, str], name: str) -> dict[str, str]:
    """The digests of all splits. Raises ConfigError when one that both have is another one now."""
    if changed := [split for split in now if began.get(split, now[split]) != now[split]]:
        raise ConfigError(
            f"resume=auto would go on with other data than the run began with: the {' and '.join(changed)} rows of "
            f"data={name} have changed, or the tokenizer's chat template. Put the old ones back, or start another name."
        )
    return {**began, **now}


def rounding(began: dict[str, Any], now: dict[str, Any]) -> str:
    """What the surroundings of a resumed run round otherwise than those that it began in; empty when nothing."""
    before, after = _flat(began), _flat(now)
    changed = [f"{key}: {before[key]} -> {after[key]}" for key in after if before.get(key, after[key]) != after[key]]
    if not changed:
        return ""
    return (
        f"This part of the run rounds sums otherwise than its beginning: {'; '.join(changed)}. The last bits of the "
        "weights may differ from an uninterrupted run's."
    )


def _flat(environment: dict[str, Any]) -> dict[str, str]:
    """What of the surroundings can change the last bits of a sum."""
    flat = {key: environment[key] for key in ("cpu", "gpus", "device", "processes", "threads") if key in environment}
    versions = environment.get("versions", {})
    flat |= {key: versions[key] for key in ("torch", "transformers") if key in versions}
    return {key: ", ".join(value) if isinstance(value, list) else str(value) for key, value in flat.items()}
