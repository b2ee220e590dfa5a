"""Describe the trajectory cache of a run and check its entries: `python -m specrl.cache run=DIR`."""

from __future__ import annotations

from dataclasses import dataclass

from specrl.config.load import RUN_ERROR
from specrl.config.load import run as run_command
from specrl.config.options import ConfigError
from specrl.results.records import find_run, run_option
from specrl.rollout.types import CacheError


@dataclass
class CacheOptions:
    run: str = run_option("run directory, or the name of a run in outputs; a checkpoint of it, or its trajectories")


def main(options: CacheOptions) -> int:
    """Prints a summary and every malformed entry. Returns RUN_ERROR if there are any."""
    # Heavy imports of entry points are lazy, so that help=true answers at once.
    from specrl.rollout.cache.record import complaint, unpack
    from specrl.rollout.cache.snapshot import FORMAT, SNAPSHOT, read_snapshot

    if not options.run:
        raise ConfigError("run is missing: the directory of a run, such as run=outputs/grpo_math")
    folder = find_run(options.run)
    if not (folder / SNAPSHOT).exists():
        folder = folder / "trajectories"
    if not (folder / SNAPSHOT).exists():
        raise CacheError(
            f"There is no trajectory cache in '{folder.parent}'. A run writes `trajectories` when it ends and into "
            "each checkpoint; give run=DIR of one that holds trajectories.parquet."
        )
    header, entries = read_snapshot(folder)
    trajectories = []
    complaints = []
    for example_id, sample_index, blob in entries:
        trajectory = unpack(blob)
        trajectories.append(trajectory)
        if reason := complaint(sample_index, trajectory, header.vocab_size, header.eos_ids):
            complaints.append(f"example {example_id!r}, sample_index {sample_index}: {reason}")
    steps = [trajectory.step for trajectory in trajectories]
    lines = {
        "format": FORMAT,
        "saved at step": header.step,
        "entries": f"{header.rows}, {len(complaints)} malformed",
        "tokens": f"{sum(len(trajectory.tokens) for trajectory in trajectories):,}",
        "size": f"{(folder / SNAPSHOT).stat().st_size / 2**20:.1f} MB",
        "steps": f"{min(steps)} to {max(steps)}" if steps else "none",
        "vocabulary": f"{header.vocab_size} ids, EOS {list(header.eos_ids)}",
        **{f"identity {key}": value for key, value in header.fingerprint.identity.items()},
        **{f"sampling {key}": value for key, value in header.fingerprint.sampling.items()},
    }
    for name, value in lines.items():
        print(f"{name:18}  {value}")
    for line in complaints:
        print(line)
    if complaints:
        print("A run that loads this cache leaves those entries out and generates their prompts without a draft.")
    return RUN_ERROR if complaints else 0


if __name__ == "__main__":
    raise SystemExit(run_command(main, schema=CacheOptions))
