"""Counts of ways of drafting that are not built, on recorded texts of the embedded policy.

    python -m benchmarks.research.counts NAME [work=DIR] [out=FILE]

NAME is a module of this package, such as `recycling`; each module's docstring says what it counts. `work` keeps the
texts and the draft model for the next count. Figures are counts, or follow from counts and the costs of the simulated
GPU of `benchmarks.research.budget`, so the speed of the machine does not matter.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.research.counts import record

NAMES = ("recycling", "trees", "adapter", "beside_texts", "law", "longest", "selection", "corrected")


def main(name: str, work: str = "", out: str = "") -> None:
    if name not in NAMES:
        raise SystemExit(f"{name} is none of the counts {', '.join(NAMES)}.")
    torch.set_num_threads(1)
    recorded = record.Record(Path(work) if work else None)
    counted = import_module(f"benchmarks.research.counts.{name}").measure(recorded)
    about = {
        "command": f"python -m benchmarks.research.counts {name} out={Path(out).name}",
        "texts": {"learnt": record.LEARNT, "replayed": record.HELD_OUT, "steps of the draft model": record.STEPS},
    }
    print(json.dumps(counted, indent=1))
    if out:
        Path(out).write_text(json.dumps({**about, **counted}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], **dict(word.split("=", 1) for word in sys.argv[2:]))
