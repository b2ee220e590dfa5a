"""The formulas of the report: seconds saved, by phase and in total, from the records of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from specrl.monitor import number

CHARGED = {"verify": "verify", "draft": "draft", "look-up": "lookup", "store": "store"}
STEP_PHASES = ("gen", "reward", "old_log_prob", "ref_log_prob", "drafter", "sync", "update")
CONTROLS = ("control", "reuse_gap")
PLAIN_PHASE = "prefill and decode"
EPOCH_END = 1 + 1e-6  # trainers compute the epoch as a quotient, so its whole numbers are inexact


@dataclass(frozen=True)
class Saving:
    """Seconds of one phase, or of whole rollouts, plainly and with specrl."""

    phase: str
    plain_s: float
    specrl_s: float

    @property
    def saved_s(self) -> float:
        return self.plain_s - self.specrl_s

    @property
    def share(self) -> float | None:
        """Saved share of this row's plain time; None where plain rollouts have no such phase."""
        return self.saved_s / self.plain_s if self.plain_s else None

    @property
    def speedup(self) -> float | None:
        return self.plain_s / self.specrl_s if self.specrl_s else None

    def cells(self) -> tuple[str, ...]:
        share = "" if self.share is None else f"{self.share:.0%}"
        return (self.phase, f"{self.plain_s:.1f}", f"{self.specrl_s:.1f}", f"{self.saved_s:.1f}", share)


def total(steps: Iterable[dict], key: str) -> float:
    return sum(number(record, key) or 0.0 for record in steps)


def mean(steps: Iterable[dict], key: str) -> float | None:
    values = [value for record in steps if (value := number(record, key)) is not None]
    return fmean(values) if values else None


def epoch(record: dict) -> float:
    """Progress in epochs after the step, so 1.0 is the last step of epoch 1; 0 when it was not recorded."""
    return number(record, "epoch") or 0.0


def later(steps: Iterable[dict]) -> list[dict]:
    """Steps from epoch 2 on: those that could reuse text."""
    return [record for record in steps if epoch(record) > EPOCH_END]


def phases(steps: Sequence[dict]) -> dict[str, float]:
    """Seconds by phase, which add up to timing_s/gen. Whatever is not charged elsewhere is prefill and decode."""
    charged = {phase: total(steps, f"timing_s/{key}") for phase, key in CHARGED.items()}
    return {PLAIN_PHASE: total(steps, "timing_s/gen") - sum(charged.values()), **charged}


def control_steps(steps: Iterable[dict]) -> list[dict]:
    """Steps whose rows were also rolled out plainly."""
    return [record for record in steps if number(record, "spec/plain_s") and number(record, "timing_s/gen")]


def measured(steps: Sequence[dict]) -> list[Saving]:
    """Evidence (a): phases and totals over the control steps. A plain rollout is all prefill and decode."""
    if not (control := control_steps(steps)):
        return []
    plain = {PLAIN_PHASE: total(control, "spec/plain_s")}
    rows = [Saving(phase, plain.get(phase, 0.0), seconds) for phase, seconds in phases(control).items()]
    return rows + _totals(control, control, "spec/plain_s")


def matched(steps: Sequence[dict], baseline: Sequence[dict]) -> tuple[list[dict], list[dict]]:
    """The steps that both runs timed, in the same order."""
    by_step = {record["step"]: record for record in baseline if number(record, "timing_s/gen")}
    own = [record for record in steps if record["step"] in by_step and number(record, "timing_s/gen")]
    return own, [by_step[record["step"]] for record in own]


def paired(steps: Sequence[dict], baseline: Sequence[dict]) -> list[Saving]:
    """Evidence (b): phases, totals, and the step around them, over the steps that both runs timed."""
    own, plain = matched(steps, baseline)
    if not own:
        return []
    before, after = phases(plain), phases(own)
    rows = [Saving(phase, before[phase], after[phase]) for phase in after]
    rows += _totals(own, plain, "timing_s/gen")
    co_training = ["drafter"] if total(own, "timing_s/drafter") else []
    for key in ("reward", *co_training, "update"):
        rows.append(Saving(key, total(plain, f"timing_s/{key}"), total(own, f"timing_s/{key}")))
    return [*rows, Saving("step, controls left out", step_s(plain), step_s(own))]


def step_s(steps: Sequence[dict]) -> float:
    """Seconds of whole steps, control rows left out."""
    return total(steps, "timing_s/step") - sum(total(steps, f"timing_s/{name}") for name in CONTROLS)


def breakdown(steps: Sequence[dict]) -> dict[str, float]:
    """Where the seconds of `step_s` went; empty when steps were not timed. What has no time of its own is `other`."""
    if not total(steps, "timing_s/step"):
        return {}
    spent = {name: total(steps, f"timing_s/{name}") for name in STEP_PHASES}
    return {name: s for name, s in spent.items() if s} | {"other": step_s(steps) - sum(spent.values())}


def step_speedup(steps: Sequence[dict]) -> float | None:
    """Whole steps with plain rollouts over whole steps as they were, on the control steps; None without any."""
    control = control_steps(steps)
    if not (own := step_s(control)):
        return None
    return (own - total(control, "timing_s/gen") + total(control, "spec/plain_s")) / own


def _totals(own: list[dict], plain: list[dict], key: str) -> list[Saving]:
    """Whole rollouts from epoch 2 on and over all these steps; `plain` holds the same steps, its seconds at `key`."""
    pairs = list(zip(own, plain, strict=True))
    scopes = {"from epoch 2 on": [pair for pair in pairs if later(pair[:1])], "all these steps": pairs}
    return [
        Saving(f"rollout, {scope}", total((p for _, p in part), key), total((o for o, _ in part), "timing_s/gen"))
        for scope, part in scopes.items()
        if part
    ]


def estimate(steps: Sequence[dict]) -> float | None:
    """Seconds saved over the whole run, extrapolated: gen seconds times (speedup of the control steps - 1).

    What co-training took is charged.
    Epoch 1 and the rest are extrapolated apart. Epoch 1 counts as saving nothing when it has no control step; None
    when the rest has none.
    """
    saved, rest = 0.0, later(steps)
    for part in ([record for record in steps if epoch(record) <= EPOCH_END], rest):
        if control := control_steps(part):
            speedup = total(control, "spec/plain_s") / total(control, "timing_s/gen")
            saved += total(part, "timing_s/gen") * (speedup - 1)
        elif part is rest:
            return None
    return saved - total(steps, "timing_s/drafter")


def first_last(steps: Sequence[dict], key: str = "reward") -> dict:
    """Means over the first and the last epoch, or over 10 % of the steps when there are not two whole epochs."""
    end = max(epoch(record) for record in steps)
    if end > 2 - 1e-6:
        first = [record for record in steps if epoch(record) <= EPOCH_END]
        last = [record for record in steps if epoch(record) > end - 1 + 1e-6]
        return {"first": mean(first, key), "last": mean(last, key), "window": "mean of an epoch"}
    count = max(1, len(steps) // 10)
    return {"first": mean(steps[:count], key), "last": mean(steps[-count:], key), "window": f"mean of {count} step(s)"}
