"""A run beside a baseline: what it saved, and whether their seconds may be compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from specrl.config.changes import differences
from specrl.results.records import RunRecords
from specrl.results.savings import Pair, Saving, costs, mean, phases, rollout_s, rollouts, saving, step_s, table, total

MACHINE = ("cpu", "cores", "usable_cores", "threads", "gpus")
VERSIONS = ("torch", "transformers", "vllm", "ray")
"""Packages whose version decides how long a step takes."""
OWN = re.compile(
    r"name|output_dir|resume|report\..*|trainer\.((save|keep|eval|log)_.*|drafter\..*)"
    r"|rollout\.(acceptance|ahead|sources|drafter|measure_every|budget\..*|cache\..*)"
)
"""Options that may differ between a run and its baseline: they are the speculation itself, or not part of a step."""
LENGTH_GAP = 0.02  # mean response lengths further apart than this can fake or hide a speedup
NAMED = 3  # differences named beside a number; the notes have all


@dataclass(frozen=True)
class Pairing:
    """A baseline run, and what stands between it and a speedup."""

    baseline: RunRecords
    steps: int
    """Rollouts that both runs timed."""
    savings: list[Saving]
    refusals: list[str] = field(default_factory=list)
    """Sentences. With any there is no speedup."""
    differing: list[str] = field(default_factory=list)
    """What else differs and can change the seconds, to be named beside the number: `key: there -> here`."""
    notes: list[str] = field(default_factory=list)

    @property
    def caveat(self) -> str:
        """Words for the sentence with the number, empty when nothing else differs."""
        more = len(self.differing) - NAMED
        named = [*self.differing[:NAMED], *([f"{more} more"] if more > 0 else [])]
        return f", perhaps not by speculation alone ({', '.join(named)})" if named else ""


def pair(own: RunRecords, baseline: RunRecords) -> Pairing:
    """Judges whether `own` may be measured against `baseline`."""
    mine, theirs = matched(own.steps, baseline.steps)
    refusals, notes, other = [], [], baseline.config
    if not mine:
        refusals.append(f"The runs have no timed step in common, so nothing is paired with {baseline.path}.")
    if own.config and own.config.rollout.acceptance == "off":
        refusals.append("This run does not speculate (rollout.acceptance=off), so it has no speedup.")
    if other and other.rollout.acceptance != "off":
        what = f"its rollout.acceptance is {other.rollout.acceptance}"
        refusals.append(f"The baseline did not decode plainly ({what}), so there is no speedup against it.")
    if unlike := unlike_machines(own, baseline):
        refusals.append(f"The baseline ran on another machine ({'; '.join(unlike)}), so the seconds tell no speedup.")
    differing = _differing(own, baseline)
    if differing:
        notes.append(f"The runs differ in more than the rollout rule: {', '.join(differing)}.")
    if 0 < len(mine) < (most := max(len(rollouts(side.steps)) for side in (own, baseline))):
        notes.append(f"{len(mine)} of {most} rollouts are paired: those that both runs timed.")
    if gap := _length_gap(mine, theirs):
        notes.append(f"Part of the difference in time is a difference in length: {gap}.")
        differing.append(gap)
    return Pairing(baseline, len(mine), paired(own.steps, baseline.steps), refusals, differing, notes)


def matched(steps: Sequence[dict], baseline: Sequence[dict]) -> tuple[list[dict], list[dict]]:
    """The rollouts that both runs timed, in the same order."""
    by_step = {record["step"]: record for record in rollouts(baseline)}
    own = [record for record in rollouts(steps) if record["step"] in by_step]
    return own, [by_step[record["step"]] for record in own]


def paired(steps: Sequence[dict], baseline: Sequence[dict]) -> list[Saving]:
    """Savings against another run: phases, totals, and the step around them, over the rollouts that both runs timed."""
    own, plain = matched(steps, baseline)
    if not own:
        return []
    before, after = ({**phases(side), **costs(side)} for side in (plain, own))
    both = zip(own, plain, strict=True)
    pairs = [Pair(record, rollout_s(record), rollout_s(other), step_s([record])) for record, other in both]
    rows = table(before, after, pairs)
    for key in ("reward", "update"):
        rows.append(saving(key, *([total([record], f"timing_s/{key}") for record in side] for side in (own, plain))))
    whole = saving("step, controls left out", *([step_s([record]) for record in side] for side in (own, plain)), True)
    return [*rows, whole]


def _differing(own: RunRecords, baseline: RunRecords) -> list[str]:
    found = []
    if own.config and baseline.config:
        changes = differences(baseline.config, own.config)
        found += [str(c) for c in changes if c.key != "name" and (c.matters or not OWN.fullmatch(c.key))]
    else:
        found.append("settings unknown")
    if own.machine is None or baseline.machine is None:
        return [*found, "machine unknown"]
    here, there = own.machine["versions"], baseline.machine["versions"]
    return found + [
        f"{name}: {there.get(name)} -> {here.get(name)}" for name in VERSIONS if there.get(name) != here.get(name)
    ]


def _length_gap(mine: Sequence[dict], theirs: Sequence[dict]) -> str:
    here, there = (mean(side, "completions/mean_length") for side in (mine, theirs))
    if here and there and abs(here / there - 1) > LENGTH_GAP:
        return f"mean response length: {there:.1f} -> {here:.1f} tokens"
    return ""


def unlike_machines(first: RunRecords, second: RunRecords) -> list[str]:
    """What differs in the machines of two runs, as `name: SECOND, not FIRST`; empty when one kept no record."""
    here, there = first.machine or {}, second.machine or {}
    unlike = [name for name in MACHINE if name in here and name in there and _cut(here, name) != _cut(there, name)]
    return [f"{name}: {_plain(there[name])}, not {_plain(here[name])}" for name in unlike]


def _cut(found: dict, name: str):
    """The value without the driver of a GPU."""
    return [", ".join(gpu.split(", ")[:2]) for gpu in found[name]] if name == "gpus" else found[name]


def _plain(value) -> str:
    return ("; ".join(value) or "none") if isinstance(value, list) else str(value)
