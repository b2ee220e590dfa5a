"""What a GPU does with the engine, as one command for a bare machine: `python -m benchmarks.gpu out=FILE [small=true]`.

It needs torch, transformers, numpy and pyarrow; training also what benchmarks/README.md says how to bring. Phases run
in the order of value, each under a deadline of its own in a process of its own; the file is written after every
measurement, so that it holds what was found whenever this ends. No figure is a speedup: seconds a token stand beside
those of `model.generate`, and of vLLM with its own defaults where that is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu import draw, env, generate, numerics, passes, rival, rollouts, training
from benchmarks.gpu.machine import about, machine
from benchmarks.gpu.options import OptionError, Options, parse
from benchmarks.gpu.run import Phase, Report, faults, run
from benchmarks.gpu.sizes import SMALL, Sizes
from benchmarks.gpu.timing import Context
from specrl.rollout.checks import suggestion

PHASES = (
    Phase("env", env.steps, 30),
    Phase("draw", draw.steps, 50),
    Phase("pass", passes.steps, 80),
    Phase("generate", generate.steps, 70),
    Phase("vllm", rival.steps, 150),
    Phase("rollouts", rollouts.steps, 200),
    Phase("numerics", numerics.steps, 60),
    Phase("training", training.steps, 60),
)


def main(words: Sequence[str]) -> int:
    try:
        options = parse(words)
        phases = chosen(options.phases)
        report = Report(Path(options.out), about(words))
        report.save()
    except (OptionError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    run(phases, partial(given, options), report, options.seconds)
    wrong = faults(report.content)
    print("\n".join([*wrong, f"{len(wrong)} faults, {report.content['seconds']} s, figures in {options.out}"]))
    return 1 if wrong else 0


def chosen(names: str) -> list[Phase]:
    """The phases that `phases=` asks for, in their own order. Raises OptionError for one that is not there."""
    known = {phase.name: phase for phase in PHASES} | {str(i): phase for i, phase in enumerate(PHASES)}
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(known)
    for name in wanted:
        if name not in known:
            nearest = suggestion(name, known) or f" There are {', '.join(known)}."
            raise OptionError(f"phases={names}: there is no phase {name!r}.{nearest}")
    return [phase for phase in PHASES if phase in {known[name] for name in wanted}]


def given(options: Options, report: Report) -> Context:
    """What a phase is given, in its own process: before, no one may ask for a GPU."""
    import torch

    there = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(there if options.device == "auto" else options.device)
    if "machine" not in report.content:
        report.content["machine"] = machine(device)
    return Context(device, SMALL if options.small else Sizes(), report)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
