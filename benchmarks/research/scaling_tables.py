"""Tables of `benchmarks.research.scaling` on 80 columns. What was not measured is marked as extrapolated."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from benchmarks.research.scaling_law import HISTORY, RATIOS
from specrl.results import tables


def show(report: dict[str, Any]) -> None:
    show_sync(report)
    show_step(report["step"], Console(width=80))


def show_sync(report: dict[str, Any]) -> None:
    print(
        f"embedded policy, {report['rows']} rows, seconds\n"
        f"  in process (2 threads) {report['in_process_s']:.3f}, two workers (1 thread each) "
        f"{report['two_workers_s']:.3f}, ratio {report['workers_over_in_process']:.3f}\n"
        f"  weight sync {report['sync_s']:.4f}, training {report['train_s']:.3f}: "
        f"{report['sync_share_of_step']:.2%} of a step\n\nmeasured sync (seconds)"
    )
    for point in report["sync"]:
        print(f"  {point['mb']:6g} MB, {point['workers']} workers: {point['seconds']:.4f}")
    formula = report["law"]
    print(
        f"formula: t = {formula['a_s']:.4f} + MB * {formula['put_s_per_mb']:.6f} + "
        f"workers * ({formula['b_s_per_worker']:.4f} + MB * {formula['copy_s_per_worker_mb']:.6f}) s\n"
        f"  within {formula['largest_relative_error']:.0%} of every point\n\n"
        "EXTRAPOLATED by the formula, one machine, bfloat16 (seconds)"
    )
    for point in report["extrapolated"]:
        print(f"  {point['model']:>5}, {point['workers']:2} workers: {point['seconds']:.2f}")


def show_step(report: dict[str, Any], console: Console) -> None:
    formula = report["law"]
    rollout, verify = formula["rollout"], formula["verify"]
    names = ("rollout_s", "rest_s", "verify_s", "sync_s")
    lines = [
        (f"{p['workers']}", *(f"{p[name]:.3f}" for name in names), f"{p['unchanged_ratio']:.0%}")
        for p in report["measured"]
    ]
    columns = ("workers", "rollout g", "rest u", "verify v", "sync", "unchanged")
    tables.show(console, "\nMEASURED terms of a step (seconds)", columns, lines)
    print(
        f"formula: g = {rollout['tail_s']:.3f} + {rollout['work_s']:.3f} / n, u = {formula['rest_s']:.3f}, "
        f"v = {verify['tail_s']:.3f} + {verify['work_s']:.3f} / n\n"
        f"  within {formula['largest_relative_error']:.0%} of every g and v, two of each for two unknowns;\n"
        f"  sync = {formula['sync_s']:.4f} + {formula['sync_s_per_worker']:.4f} n as above, as if on one machine\n"
        "  synchronous    g + u + sync\n"
        "  ahead          max(g, u) + v min(1, u / g) + sync\n"
        "  one step off   max(g, u) + sync, and trains on text of stale weights"
    )
    for history in (False, True):
        drafts = f"with drafts of old text (g / {HISTORY['factor']})" if history else "plain rollouts"
        ratios, workers = ([p for p in report[name] if p["history"] == history] for name in ("by_ratio", "by_workers"))
        show_ratios(ratios, drafts, console)
        show_workers(workers, drafts, console)
    print(f"{HISTORY['factor']}: {HISTORY['source']}")


def show_ratios(points: list[dict[str, Any]], drafts: str, console: Console) -> None:
    """A line for each number of workers, a column for each ratio."""
    lines = []
    for workers in dict.fromkeys(p["workers"] for p in points):
        row = [p for p in points if p["workers"] == workers]
        speeds = [[p["synchronous_s"] / p[way] for way in ("ahead_s", "one_step_off_s")] for p in row]
        lines.append((f"{workers}", *(f"{ahead:.2f} ({one_off:.2f})" for ahead, one_off in speeds)))
    title = f"\nEXTRAPOLATED, {drafts}:\nspeed over synchronous: ahead (one step off), by what plain g is"
    tables.show(console, title, ("workers", *(f"g = {ratio:g} u" for ratio in RATIOS)), lines)


def show_workers(points: list[dict[str, Any]], drafts: str, console: Console) -> None:
    """A line for each number of workers; the batch is the same for all, as it is the learning that chooses it."""
    names = ("rollout_s", "verify_s", "sync_s", "synchronous_s", "ahead_s", "one_step_off_s")
    lines = [(f"{p['workers']}{'*' * p['extrapolated']}", *(f"{p[name]:.3f}" for name in names)) for p in points]
    title = f"\nBy the formula, {drafts}:\nseconds of a step, the measured batch shared by all workers (* EXTRAPOLATED)"
    tables.show(console, title, ("workers", "g", "v", "sync", "synchronous", "ahead", "one step off"), lines)
