"""The budget against fixed draft lengths on simulated machines, where nothing but its choices differs."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.budget import BUDGET, WINDOWS, Clock, cells


def test_the_clock_charges_rows_tokens_and_positions():
    clock = Clock(5.0, 0.1, 0.02, 0.001)
    clock.charge(rows=8, tokens=20, width=50)
    assert clock() == pytest.approx((5 + 0.8 + 20 * (0.02 + 0.05)) / 1e3)


def test_a_cell_compares_with_the_best_fixed_length():
    speedups = {"plain": 1.0, BUDGET: 1.8, **{f"window {w}": 2.0 - w / 64 for w in WINDOWS}}
    (cell,) = cells([{"rows": 8, "regime": "r", "method": name, "speedup": x} for name, x in speedups.items()])
    assert cell["budget / best"] == pytest.approx(1.8 / (2 - 2 / 64))


@pytest.mark.long
def test_the_budget_is_near_the_best_fixed_length(tmp_path):
    """Of each cell's best, at eight rows, from first epochs to little drift."""
    command = [sys.executable, "-m", "benchmarks.budget", "rows=[8]", "repeats=1"]
    out = tmp_path / "out.json"
    subprocess.run([*command, f"out={out}"], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600)
    found = json.loads(out.read_text())["cells"]
    assert len(found) == 4
    assert min(cell["budget / best"] for cell in found) > 0.9, found
    for window in WINDOWS:
        behind = [cell["speedup"][f"window {window}"] / cell["speedup"][BUDGET] for cell in found]
        assert min(behind) < 0.95, f"control: window {window} does as well"
