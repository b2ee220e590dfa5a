"""What a GPU does with the engine, as one command for a bare machine: `python -m benchmarks.gpu out=FILE [small=true]`.

It needs torch, transformers, numpy and pyarrow; the phase `training` needs packages that benchmarks/README.md says how
to bring. Phases run in the order of value, each in a process of its own under a deadline. The file is written after
every measurement, so that nothing measured is lost. No figure is a speedup: seconds a token are listed with those of
`model.generate`, and of vLLM with its own defaults where that is installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu import draw, engines, env, generate, numerics, passes, rival, rollouts, training
from benchmarks.gpu.machine import about, machine
from benchmarks.gpu.run import Phase, Report, faults, run
from benchmarks.gpu.sizes import SMALL, Sizes
from benchmarks.gpu.timing import Context

PHASES = (
    Phase("env", env.steps, 30),
    Phase("draw", draw.steps, 50),
    Phase("pass", passes.steps, 80),
    Phase("generate", generate.steps, 70),
    Phase("vllm", rival.steps, 150),
    Phase("rollouts", rollouts.steps, 200),
    Phase("numerics", numerics.steps, 60),
    Phase("training", training.steps, 60),
    Phase("engines", engines.steps, 400),
)


def main(words: Sequence[str]) -> int:
    options = parse(words)
    report = Report(Path(options.out), about(words))
    report.save()
    run(options.phases, partial(context, options), report, options.seconds)
    wrong = faults(report.content)
    print("\n".join([*wrong, f"{len(wrong)} faults, {report.content['seconds']} s, figures in {options.out}"]))
    return 1 if wrong else 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The `key=value` words of a command line, without PyYAML, which a bare machine may lack."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", allow_abbrev=False, description="Options are written key=value."
    )
    parser.add_argument("--out", required=True, help="write the figures to this JSON file, after every measurement")
    parser.add_argument("--small", type=lambda text: text == "true", help="true: tiny sizes, every phase, anywhere")
    parser.add_argument("--phases", type=chosen, default=PHASES, help="only these, by number or name: 0,1,pass")
    parser.add_argument("--seconds", type=int, default=900, help="of all phases together")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser.parse_args([f"--{word}" for word in words])


def chosen(names: str) -> list[Phase]:
    """The phases that `phases=` asks for, in their order. Raises ArgumentTypeError for an unknown one."""
    known = {phase.name: phase for phase in PHASES} | {str(number): phase for number, phase in enumerate(PHASES)}
    wanted = [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in known]:
        raise argparse.ArgumentTypeError(f"there is no phase {unknown[0]!r}, only {', '.join(known)}")
    return [phase for phase in PHASES if phase in [known[name] for name in wanted]]


def context(options: argparse.Namespace, report: Report) -> Context:
    """The context of a phase, made in its own process: the parent must not ask for a GPU."""
    import torch

    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if "machine" not in report.content:
        report.content["machine"] = machine(device)
    return Context(device, SMALL if options.small else Sizes(), report)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
