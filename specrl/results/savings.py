"""The formulas of the report: seconds saved, by phase and in total, from the records of metrics.jsonl.

All savings are net. `timing_s/gen` includes look-up, drafting, verification and store; COSTS are what only the run with
specrl has. Control rows and the rows of the reuse gap are measurement, and on neither side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specrl.results.records import counted, epoch, mean, number, text, total
from specrl.results.speedup import Speedup, bounded, speedup

CHARGED = {"verify": "verify", "draft": "draft", "look-up": "lookup", "store": "store"}
COSTS = {"co-training": "drafter", "cache to disk": "cache_save"}
"""What plain rollouts do without, by its name in `timing_s/`."""
STEP_PHASES = ("gen", "reward", "old_log_prob", "ref_log_prob", "drafter", "sync", "update", "cache_save")
CONTROLS = ("control", "reuse_gap")
PLAIN_PHASE = "prefill and decode"
EPOCH_END = 1 + 1e-6  # trainers compute the epoch as a quotient, so its whole numbers are inexact


@dataclass(frozen=True)
class Saving:
    """Seconds of one phase, or of whole rollouts, plainly and with specrl."""

    phase: str
    plain_s: float
    specrl_s: float
    speedup: Speedup | None = None
    """Of whole rollouts and whole steps; None for a phase."""

    @property
    def saved_s(self) -> float:
        return self.plain_s - self.specrl_s

    @property
    def share(self) -> float | None:
        """Saved share of this row's plain time; None where plain rollouts have no such phase."""
        return self.saved_s / self.plain_s if self.plain_s else None

    def cells(self) -> tuple[str, ...]:
        share = "" if self.share is None else text(100 * self.share, 0) + "%"
        return (self.phase, *(text(seconds, 1) for seconds in (self.plain_s, self.specrl_s, self.saved_s)), share)


@dataclass(frozen=True)
class Pair:
    """One rollout as it was, and plainly."""

    record: dict
    own_s: float
    """Its seconds, with its share of COSTS."""
    plain_s: float
    step_s: float
    """Of the whole optimiser step as it was, control rows left out, with its share of COSTS; 0 when not timed."""


def later(steps: Iterable[dict]) -> list[dict]:
    """Steps from epoch 2 on: those whose prompts have old text of their own."""
    return [record for record in steps if epoch(record) > EPOCH_END]


def costs(steps: Iterable[dict]) -> dict[str, float]:
    """Seconds of COSTS, of those that there are."""
    steps = list(steps)
    return {name: s for name, key in COSTS.items() if (s := total(steps, f"timing_s/{key}"))}


def rollouts(steps: Iterable[dict]) -> list[dict]:
    """One record per timed rollout; optimiser steps up to the next rollout add their seconds to it."""
    found: list[dict] = []
    for record in steps:
        if number(record, "timing_s/gen"):
            found.append(dict(record))
        elif found:
            timed = {key: value for key in record if key.startswith("timing_s/") and (value := number(record, key))}
            found[-1] |= {key: (number(found[-1], key) or 0.0) + value for key, value in timed.items()}
    return found


def phases(steps: Sequence[dict]) -> dict[str, float]:
    """Seconds by phase, which add up to timing_s/gen. Whatever is not charged elsewhere is prefill and decode."""
    charged = {phase: total(steps, f"timing_s/{key}") for phase, key in CHARGED.items()}
    return {PLAIN_PHASE: total(steps, "timing_s/gen") - sum(charged.values()), **charged}


def control_steps(steps: Iterable[dict]) -> list[dict]:
    """Steps whose rows were also rolled out plainly."""
    return [record for record in steps if number(record, "spec/plain_s") and number(record, "timing_s/gen")]


def control_pairs(steps: Sequence[dict]) -> list[Pair]:
    """The control steps, each charged with the mean COSTS of a rollout: those of its epoch 1, or of all later epochs.

    Co-training may train in every other step, so what a control step happened to carry says little.
    """
    found = []
    for part in _parts(rollouts(steps)):
        share = sum(costs(part).values()) / max(1, len(part))
        for record in control_steps(part):
            own = total([record], "timing_s/gen") + share
            plain = total([record], "spec/plain_s")
            whole = step_s([record])
            found.append(Pair(record, own, plain, whole - sum(costs([record]).values()) + share if whole else 0.0))
    return found


def _parts(steps: Sequence[dict]) -> tuple[list[dict], list[dict]]:
    """Epoch 1, and the rest."""
    return [record for record in steps if epoch(record) <= EPOCH_END], later(steps)


def measured(steps: Sequence[dict]) -> list[Saving]:
    """Savings on the control steps, by phase and in total. A plain rollout is all prefill and decode."""
    if not (pairs := control_pairs(steps)):
        return []
    after = phases([pair.record for pair in pairs])
    charged = sum(pair.own_s for pair in pairs) - sum(after.values())
    names = costs(rollouts(steps))
    after |= {name: charged * s / sum(names.values()) for name, s in names.items()}
    return table({}, after, pairs)


def rollout_s(record: dict) -> float:
    return total([record], "timing_s/gen") + sum(costs([record]).values())


def table(before: dict[str, float], after: dict[str, float], pairs: Sequence[Pair]) -> list[Saving]:
    """Phases, and the totals that they add up to; what bounding takes is taken from plain prefill and decode."""
    kept = sum(bounded(*zip(*((pair.own_s, pair.plain_s) for pair in pairs), strict=True)))
    plain = before | {PLAIN_PHASE: kept - sum(s for phase, s in before.items() if phase != PLAIN_PHASE)}
    rows = [Saving(phase, plain.get(phase, 0.0), after.get(phase, 0.0)) for phase in {**after, **before}]
    scopes = {"from epoch 2 on": [pair for pair in pairs if later([pair.record])], "all these steps": pairs}
    totals = [
        saving(f"rollout, {scope}", [pair.own_s for pair in part], [pair.plain_s for pair in part], True)
        for scope, part in scopes.items()
        if part
    ]
    return rows + totals


def saving(name: str, own: Sequence[float], plain: Sequence[float], claim: bool = False) -> Saving:
    return Saving(name, sum(bounded(own, plain)), sum(own), speedup(own, plain) if claim else None)


def step_s(steps: Sequence[dict]) -> float:
    """Seconds of whole steps, control rows left out, and of saving the cache between two steps."""
    return (
        total(steps, "timing_s/step")
        + total(steps, "timing_s/cache_save")
        - sum(total(steps, f"timing_s/{name}") for name in CONTROLS)
    )


def breakdown(steps: Sequence[dict]) -> dict[str, float]:
    """Where the seconds of `step_s` went; empty when steps were not timed. What has no time of its own is `other`."""
    if not total(steps, "timing_s/step"):
        return {}
    spent = {name: total(steps, f"timing_s/{name}") for name in STEP_PHASES}
    return {name: s for name, s in spent.items() if s} | {"other": step_s(steps) - sum(spent.values())}


def step_speedup(steps: Sequence[dict]) -> Speedup | None:
    """Whole steps with plain rollouts and without COSTS over whole steps as they were, on the control steps."""
    pairs = [pair for pair in control_pairs(steps) if pair.step_s]
    own = [pair.step_s for pair in pairs]
    return speedup(own, [s + pair.plain_s - pair.own_s for s, pair in zip(own, pairs, strict=True)])


@dataclass(frozen=True)
class Estimate:
    """Seconds saved over a whole run, extrapolated, with a 95 % interval; None below speedup.FEWEST control steps."""

    saved_s: float
    low: float | None
    high: float | None

    def told(self, steps: int) -> str:
        """For people; without a figure where its interval holds 0."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            saved = "no difference that can be told from noise"
        else:
            saved = f"{self.saved_s:.1f} s saved (95 % interval {self.low:.1f} to {self.high:.1f} s)"
        return f"Extrapolated to all {counted(steps, 'step')}: {saved}."


def estimate(steps: Sequence[dict]) -> Estimate | None:
    """Seconds of the rollouts, with COSTS, times (speedup of the control steps - 1).

    Epoch 1 and the rest are extrapolated apart, and the interval is that of the rest. Epoch 1 counts as saving nothing
    when it has no control step; None when the rest has none.
    """
    first, rest = (_extrapolated(part) for part in _parts(rollouts(steps)))
    if rest is None:
        return None
    seconds, found = rest
    before = first[0] * (first[1].ratio - 1) if first else 0.0
    ends = (None if end is None else before + seconds * (end - 1) for end in (found.low, found.high))
    return Estimate(before + seconds * (found.ratio - 1), *ends)


def _extrapolated(part: Sequence[dict]) -> tuple[float, Speedup] | None:
    """Seconds of these rollouts, with COSTS, and the speedup on their control steps."""
    pairs = control_pairs(part)
    found = speedup([pair.own_s for pair in pairs], [pair.plain_s for pair in pairs])
    return (sum(map(rollout_s, part)), found) if found else None


def first_last(steps: Sequence[dict], key: str = "reward") -> dict:
    """Means over the first and the last epoch, or over 10 % of the steps when there are not two whole epochs."""
    end = max(epoch(record) for record in steps)
    if end > 2 - 1e-6:
        first = [record for record in steps if epoch(record) <= EPOCH_END]
        last = [record for record in steps if epoch(record) > end - 1 + 1e-6]
        return {"first": mean(first, key), "last": mean(last, key), "window": "mean of an epoch"}
    count = max(1, len(steps) // 10)
    return {
        "first": mean(steps[:count], key),
        "last": mean(steps[-count:], key),
        "window": f"mean of {counted(count, 'step')}",
    }
