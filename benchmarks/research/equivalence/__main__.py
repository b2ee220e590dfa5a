"""Does a rollout rule change what is learned, and what does it save?

    python -m benchmarks.research.equivalence out=FILE.json

Every rule trains the toy policy with GRPO and PPO from the same tasks, initial policies and prompt orders. Measured are
the mean reward of a batch minus its exact expectation under the same weights; the final exact reward minus that of
plain decoding, paired by seed, by two one-sided tests; and recorded against recomputed log-probs, also in the real
trainers. Planted faults run in the same invocation; if one is not caught, or equal rules do not come out equal, the
result is invalid and the exit code 1. All figures are counts and rewards; none depends on the machine's speed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from specrl.config import load as cli
from specrl.rollout.sections import doc

ALGORITHMS = ("grpo", "ppo")


@dataclass
class Options:
    seeds: int = doc(28, "runs of each rule: tasks, initial policies and orders of prompts")
    out: str = doc("", "write the figures to this JSON file")


def main(options: Options) -> int:
    import torch

    from benchmarks.research.equivalence.arms import ARMS
    from benchmarks.research.equivalence.learning import Run
    from benchmarks.research.equivalence.on_policy import measure

    torch.set_num_threads(1)
    outcomes: dict = {algorithm: {arm.name: [] for arm in ARMS} for algorithm in ALGORITHMS}
    for seed in range(options.seeds):
        for algorithm in ALGORITHMS:
            for arm in ARMS:
                outcomes[algorithm][arm.name].append(Run(arm, algorithm, seed).train())
        print(f"seed {seed + 1} of {options.seeds}", flush=True)
    return report(outcomes, {algorithm: measure(algorithm) for algorithm in ALGORITHMS}, options.out)


def report(outcomes: dict, trainers: dict, out: str) -> int:
    """Prints the table, writes the files, and returns the exit code.

    Args: outcomes by algorithm and arm, in the order of seeds; trainers: what `on_policy.measure` found.
    """
    from benchmarks.research.equivalence import table
    from benchmarks.research.equivalence.verdicts import checks, line, trainer_checks

    lines, checked = [], []
    for algorithm, runs in outcomes.items():
        own = [line(algorithm, name, runs) for name in runs]
        lines += own
        checked += [*checks(algorithm, runs, own), *trainer_checks(algorithm, trainers[algorithm])]
    table.show(lines, checked)
    valid = all(check.ok for check in checked)
    if out:
        result = {"valid": valid, "lines": [asdict(found) for found in lines]}
        result |= {"checks": [asdict(check) for check in checked], "trainers": trainers}
        Path(out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("valid" if valid else "INVALID: a check failed, so the table shows nothing")
    return 0 if valid else 1


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=Options, training=False))
