"""What the figures of a run allow to be said: savings with their claims, the rule, and what limits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import TYPE_CHECKING

from specrl.config.schema import Config
from specrl.results.flips import flips
from specrl.results.records import METRICS_FILE, RunRecords, number
from specrl.results.savings import COSTS, Saving, control_pairs, counted, later, measured, step_speedup, total
from specrl.results.speedup import FEWEST, Speedup
from specrl.run.policy import rollout_dtype

if TYPE_CHECKING:
    from specrl.results.pairing import Pairing


@dataclass(frozen=True)
class Evidence:
    """One kind of measurement: what was saved, and what may be claimed of it."""

    title: str
    rows: list[Saving]
    claims: list[str]
    caveat: str = ""

    def shown(self) -> list[Saving]:
        """Without phases that took no time to speak of."""
        return [row for row in self.rows if row.speedup or any(float(cell) for cell in row.cells()[1:4])]

    def summary(self) -> dict:
        """For report.json."""
        keys = ("phase", "plain_s", "specrl_s", "saved_s", "share")
        rows = [{key: getattr(row, key) for key in keys} | {"speedup": numbers(row.speedup)} for row in self.rows]
        return {"title": self.title, "claims": self.claims, "caveat": self.caveat, "savings": rows}


def evidence(steps: Sequence[dict], pairing: Pairing | None) -> dict[str, Evidence]:
    """What was measured, by its kind: `measured` and `paired`; a kind that there is none of is absent."""
    found = {}
    if rows := measured(steps):
        whole = step_speedup(steps)
        more = [Saving("step, controls left out", 0.0, 0.0, whole)] if whole else []
        found["measured"] = Evidence(_measured_title(steps), rows, claims([*rows, *more]))
    if pairing and not pairing.refusals:
        title = f"Paired with {pairing.baseline.path}, {counted(pairing.steps, 'step')}"
        found["paired"] = Evidence(title, pairing.savings, claims(pairing.savings, pairing.caveat), pairing.caveat)
    return found


def _measured_title(steps: Sequence[dict]) -> str:
    pairs = control_pairs(steps)
    spread = ""
    if len(pairs) >= FEWEST:
        low, _, high = quantiles([pair.plain_s / pair.own_s for pair in pairs], method="inclusive")
        spread = f"; the middle half {low:.2f}x to {high:.2f}x"
    return f"Measured on {counted(len(pairs), 'control step')} of {len(steps)}{spread}"


def claims(rows: Sequence[Saving], caveat: str = "") -> list[str]:
    """A sentence for every speedup of a table; `caveat` says what else could have made it."""
    charged = [row.phase for row in rows if row.phase in COSTS and row.phase != "cache to disk"]  # storing is usual
    words = f", {' and '.join(charged)} charged" * bool(charged) + caveat
    return [f"Speedup of the {row.phase}{words}: {row.speedup}" for row in rows if row.speedup]


def numbers(found: Speedup | None) -> dict | None:
    return asdict(found) | {"told": found.told} if found else None


def law(config: Config | None) -> str:
    """What the rollout rule of a run samples from: its name, a colon and a sentence."""
    if config is None:
        return "unknown: the run's config.yaml is missing or unreadable."
    rollout = config.rollout
    if rollout.acceptance in ("judged", "routed"):
        what = "old text" if rollout.accepts_old_text else "the draft model's text"
        by = getattr(rollout, rollout.acceptance).by
        return f"lossy: {what} stands where rollout.{rollout.acceptance}.by={by} allows, by the law that drew it."
    if rollout.acceptance == "off":
        return "off: plain decoding without speculation."
    if rollout.acceptance == "lenient":
        return f"lenient, l={rollout.lenience:g}: SPEC-RL as published; biased towards the stored text."
    if not rollout.replay:
        return "exact, replay=0: the tokens plain decoding draws, with fresh noise at every visit: on-policy RL."
    return (
        f"exact, replay={rollout.replay:g}: the tokens plain decoding draws with the same keys; replayed rows are not "
        "independent of the weights, and spec/reuse_gap measures what that does."
    )


def numerics(config: Config | None) -> str:
    """Type of the weights that a run draws responses with; empty where it is unknown."""
    return rollout_dtype(config) if config else ""


def notes(own: RunRecords, pairing: Pairing | None) -> list[str]:
    """Everything a reader must know before quoting a number."""
    found, steps, config = [], own.steps, own.config
    if own.finished is False:
        found.append(f"The run is unfinished; its last step is {own.last['step']}.")
    if own.unreadable:
        found.append(f"{counted(own.unreadable, 'unreadable line')} of {METRICS_FILE} left out.")
    paired_with = pairing and not pairing.refusals
    if not paired_with and not control_pairs(steps) and (config is None or config.rollout.acceptance != "off"):
        found.append(_unmeasured(config))
    if not later(steps) and not any(number(record, "spec/hit_rate") for record in steps):
        found.append("No step is from epoch 2 on, so no prompt had old text of its own to draft from.")
    if (parted := flips(steps)) and parted.count:
        found.append(f"On control steps {parted.told(numerics(config))}.")
    if lost := total(steps, "reward/failed"):
        found.append(f"{counted(lost, 'response')} got no reward and took no part in the update.")
    return found + (pairing.refusals + pairing.notes if pairing else [])


def _unmeasured(config: Config | None) -> str:
    """Why there are no control steps."""
    if config is None:
        return "No control steps, so no speedup was measured."
    if config.rollout.acceptance != "exact":
        return (
            "No speedup was measured: control steps compare with plain decoding, whose text a lossy rule does not "
            "write. Give baseline=DIR, a run with rollout.acceptance=off."
        )
    every = config.rollout.measure_every
    return f"No control steps, so no speedup was measured: with rollout.measure_every={every} the run had none."
