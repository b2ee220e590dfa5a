"""Scylla (arXiv 2505.07858): agreement over the draft model's size and the tokens that it learns from.

The law that is fitted is a power law of disagreement, 1 - a = C N^-alpha D^-beta with N layers and D tokens. It is
judged by what it says of the largest cell, which it has not seen, beside the mere agreement of the cell before.
"""

from __future__ import annotations

import numpy as np

from benchmarks.research.counts.record import Record
from specrl.drafter import DrafterOptions, agreement, distil, shortened

LAYERS = (1, 2, 4)
BUDGETS = (40, 80, 160)  # optimiser steps
BATCH = 8  # responses of a step


def measure(record: Record) -> dict:
    """Agreement of every cell, the law, and its error on the largest cell."""
    cells = []
    each = BATCH * sum(map(len, record.learnt)) / len(record.learnt)  # tokens of a step
    for layers in LAYERS:
        for steps in BUDGETS:
            student = shortened(record.policy, layers)
            distil(record.policy, student, record.learnt, DrafterOptions(steps=steps, batch=BATCH))
            share = agreement(record.policy, student, record.texts, record.keys)
            cells.append({"layers": layers, "tokens": round(steps * each), "agreement": round(share, 4)})
    return {"cells": cells, **law(cells)}


def law(cells: list[dict]) -> dict:
    """The law of all cells and its R2, and what it says of the last cell when fitted to the others."""
    x = np.array([[1.0, np.log(cell["layers"]), np.log(cell["tokens"])] for cell in cells])
    y = np.log([1 - cell["agreement"] for cell in cells])
    c, size, tokens = np.linalg.lstsq(x, y, rcond=None)[0]
    left = y - x @ [c, size, tokens]
    without = np.linalg.lstsq(x[:-1], y[:-1], rcond=None)[0]
    last = cells[-1]["agreement"]
    return {
        "law": {"C": round(float(np.exp(c)), 4), "alpha": round(float(-size), 4), "beta": round(float(-tokens), 4)},
        "R2": round(float(1 - (left**2).sum() / ((y - y.mean()) ** 2).sum()), 4),
        "largest cell": {"agreement": last, "by the law": round(float(1 - np.exp(x[-1] @ without)), 4)},
    }
