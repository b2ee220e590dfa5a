"""The rules that are compared, and the planted faults that the comparison must catch."""

from __future__ import annotations

import math

from benchmarks.research.equivalence.learning import OTHER_NOISE, Arm


def lenient(lenience: float) -> dict:
    return {"acceptance": "lenient", "lenience": lenience}


OFF = Arm("off", {"acceptance": "off"})
AGAIN = Arm("off, other noise", {"acceptance": "off"}, noise=OTHER_NOISE)
EXACT = Arm("exact, replay 0")
PUBLISHED = Arm("lenient, l = 1", lenient(1.0))
RULES = (
    EXACT,
    Arm("exact, replay 0.25", {"replay": 0.25}),
    Arm("exact, replay 0.5", {"replay": 0.5}),
    Arm("exact, replay 1", {"replay": 1.0}),
    PUBLISHED,
    *(Arm(f"lenient, l = e^{power}", lenient(math.exp(power))) for power in (0.15, 0.3, 0.5)),
)
FULL_REUSE = Arm("control: full reuse", lenient(1e30), correction="none")
CONSTANT = Arm("control: constant noise", lenient(1.0), constant=True, correction="none")
CONTROLS = (FULL_REUSE, CONSTANT)
ARMS = (OFF, AGAIN, *RULES, *CONTROLS)
