"""Report the speedup and the learning of a run from its metrics: report.md, report.json and report.png.

    python -m specrl.report run=DIR [baseline=DIR]
    python -m specrl.report runs=[DIR,DIR,...]        # compares runs: comparison.md and comparison.png

specrl/results/report.py writes the report, specrl/results/compare.py the comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specrl.config.load import run as run_command
from specrl.config.options import ConfigError
from specrl.results.records import run_option
from specrl.rollout.sections import doc


@dataclass
class ReportOptions:
    run: str = run_option("run directory, or the name of a run in outputs")
    baseline: str = doc("", "run directory of the same experiment with rollout.acceptance=off")
    runs: list[str] = field(default_factory=list, metadata={"help": "two or more runs to compare, instead of run"})
    plots: bool = doc(True, "draw the picture when matplotlib is installed")


def main(options: ReportOptions) -> int:
    from specrl.results.compare import write_comparison  # lazy, so that help=true answers at once
    from specrl.results.report import write_report

    if bool(options.run) == bool(options.runs) or (options.runs and options.baseline):
        raise ConfigError("Give one of run=DIR, run=DIR baseline=DIR, and runs=[DIR,DIR,...].")
    if options.runs:
        write_comparison(options.runs, options.plots).show()
    else:
        write_report(options.run, options.baseline or None, options.plots).show()
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main, schema=ReportOptions))
