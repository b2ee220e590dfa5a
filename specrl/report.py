"""Report the speedup and the learning of a run from its metrics: report.md, report.json and report.png.

python -m specrl.report run=DIR [baseline=DIR]
"""

from __future__ import annotations

from dataclasses import dataclass

from specrl.config.load import run as run_command
from specrl.config.options import ConfigError
from specrl.rollout.sections import doc


@dataclass
class ReportOptions:
    run: str = doc("", "run directory, or the name of a run in outputs")
    baseline: str = doc("", "run with rollout.acceptance=off, for the speedup, or with the same seed, for the reward")
    plots: bool = doc(True, "draw the picture when matplotlib is installed")


def main(options: ReportOptions) -> int:
    from specrl.results.report import write_report  # lazy, so that help=true answers at once

    if not options.run:
        raise ConfigError("run is missing: the run directory, such as run=outputs/grpo_math")
    write_report(options.run, options.baseline or None, options.plots).show()
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main, schema=ReportOptions))
