"""Check or describe the trajectory cache of a run: `python -m specrl.cache verify|info run=DIR`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specrl.config.load import RUN_ERROR, USAGE_ERROR, run
from specrl.config.options import ConfigError
from specrl.results.records import find_run, run_option
from specrl.rollout.checks import suggestion
from specrl.rollout.types import CacheError

USAGE = "usage: python -m specrl.cache verify|info run=DIR"


@dataclass
class CacheOptions:
    run: str = run_option("run directory, or the name of a run in outputs; a checkpoint of it, or its trajectories")


def verify(directory: Path) -> int:
    """Checks every entry of the file and prints the malformed ones. Returns RUN_ERROR if there are any."""
    # Heavy imports of entry points are lazy, so that help=true answers at once.
    from specrl.rollout.cache.record import complaint, unpack
    from specrl.rollout.cache.snapshot import read_snapshot

    complaints = []
    header, entries = read_snapshot(directory)
    for example_id, sample_index, blob in entries:
        if reason := complaint(sample_index, unpack(blob), header.vocab_size, header.eos_ids):
            complaints.append(f"example {example_id!r}, sample_index {sample_index}: {reason}")
    for line in complaints:
        print(line)
    print(f"{header.rows} entries: {header.rows - len(complaints)} good, {len(complaints)} malformed")
    if complaints:
        print("A run that loads this cache leaves those entries out and generates their prompts without a draft.")
    return RUN_ERROR if complaints else 0


def info(directory: Path) -> int:
    """Prints a summary of a snapshot."""
    from specrl.rollout.cache.record import unpack
    from specrl.rollout.cache.snapshot import FORMAT, SNAPSHOT, read_snapshot

    header, entries = read_snapshot(directory)
    found = [(example_id, unpack(blob)) for example_id, _, blob in entries]
    trajectories = [trajectory for _, trajectory in found]
    steps = [t.step for t in trajectories]
    size = (directory / SNAPSHOT).stat().st_size
    lines = {
        "format": FORMAT,
        "saved at step": header.step,
        "entries": f"{len(found)}, {len({example_id for example_id, _ in found})} examples",
        "tokens": f"{sum(len(t.tokens) for t in trajectories):,}",
        "size": f"{size / 2**20:.1f} MB",
        "steps": f"{min(steps)} to {max(steps)}" if steps else "none",
        "finished": f"{sum(t.finish == 'stop' for t in trajectories)} by EOS",
        "with reward": sum(t.reward is not None for t in trajectories),
        "with log-probs": sum(t.logprobs is not None for t in trajectories),
        "vocabulary": f"{header.vocab_size} ids, EOS {list(header.eos_ids)}",
        **{f"identity {key}": value for key, value in header.fingerprint.identity.items()},
        **{f"sampling {key}": value for key, value in header.fingerprint.sampling.items()},
    }
    for name, value in lines.items():
        print(f"{name:18}  {value}")
    return 0


COMMANDS = {"verify": verify, "info": info}


def _checked(command: Callable[[Path], int], options: CacheOptions) -> int:
    from specrl.rollout.cache.snapshot import SNAPSHOT

    if not options.run:
        raise ConfigError(f"run is missing. {USAGE}")
    folder = find_run(options.run)
    place = next((each for each in (folder, folder / "trajectories") if (each / SNAPSHOT).exists()), None)
    if place is None:
        raise CacheError(
            f"There is no trajectory cache in '{folder}'. A run writes `trajectories` when it ends and into each "
            "checkpoint; give run=DIR of one that holds trajectories.parquet."
        )
    return command(place)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns 0 if done, 2 for a usage error, 3 for malformed entries or an unreadable cache."""
    word, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if word in COMMANDS:
        return run(partial(_checked, COMMANDS[word]), rest, CacheOptions)
    if word == "help=true":
        print(USAGE)
        return 0
    print(f"error: Unknown command '{word}'.{suggestion(word, list(COMMANDS))} {USAGE}", file=sys.stderr)
    return USAGE_ERROR


if __name__ == "__main__":
    raise SystemExit(main())
