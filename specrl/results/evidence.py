"""Claims that a run's metrics support: savings, the rollout rule, and the notes that limit them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import quantiles

from specrl.config.rules import differences
from specrl.config.schema import Config
from specrl.results.records import METRICS_FILE, RunRecords, counted, mean, number, total
from specrl.results.savings import (
    COSTS,
    Pair,
    Saving,
    control_pairs,
    costs,
    later,
    measured,
    phases,
    rollout_s,
    rollouts,
    saving,
    step_s,
    step_speedup,
    table,
)
from specrl.results.speedup import FEWEST, Speedup, flips
from specrl.run.policy import rollout_dtype

SAME_MACHINE = ("cpu", "cores", "usable_cores", "threads", "gpus")
VERSIONS = ("torch", "transformers", "vllm", "ray")
"""Packages whose version decides how long a step takes."""
OWN = re.compile(
    r"name|output_dir|resume|report\..*|trainer\.((save|keep|eval|log)_.*|drafter\..*)"
    r"|rollout\.(acceptance|ahead|sources|drafter|measure_every|budget\..*|cache\..*)"
)
"""Options that may differ between a run and its baseline: they configure speculation or do not affect a step's time."""
LENGTH_GAP = 0.02  # a larger relative difference in mean response length can fake or hide a speedup
NAMED = 3  # differences that are listed in the sentence with the speedup; the notes list all


@dataclass(frozen=True)
class Pairing:
    """A comparison with a baseline run, and the reasons that rule out or qualify a speedup."""

    baseline: RunRecords
    steps: int
    """Number of rollouts that both runs timed."""
    savings: list[Saving]
    refusals: list[str] = field(default_factory=list)
    """Sentences that say why there is no speedup; empty if there is one."""
    differing: list[str] = field(default_factory=list)
    """Other differences that can change the seconds, as `key: baseline -> run`. They are listed with the speedup."""
    notes: list[str] = field(default_factory=list)

    @property
    def caveat(self) -> str:
        """Text for the sentence with the speedup; empty if nothing else differs."""
        more = len(self.differing) - NAMED
        named = [*self.differing[:NAMED], *([f"{more} more"] if more > 0 else [])]
        return f", perhaps not by speculation alone ({', '.join(named)})" if named else ""


@dataclass(frozen=True)
class Evidence:
    """The savings of one kind of measurement, and the claims that they support."""

    title: str
    rows: list[Saving]
    claims: list[str]
    caveat: str = ""

    def shown(self) -> list[Saving]:
        """The rows without phases whose seconds round to 0."""
        return [row for row in self.rows if row.speedup or any(float(cell) for cell in row.cells()[1:4])]

    def summary(self) -> dict:
        """The content for report.json."""
        keys = ("phase", "plain_s", "specrl_s", "saved_s", "share")
        rows = [{key: getattr(row, key) for key in keys} | {"speedup": numbers(row.speedup)} for row in self.rows]
        return {"title": self.title, "claims": self.claims, "caveat": self.caveat, "savings": rows}


def evidence(steps: Sequence[dict], pairing: Pairing | None) -> dict[str, Evidence]:
    """The measurements by kind, `measured` and `paired`; a kind without data is absent."""
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
    """A sentence for each speedup in a table; `caveat` names other possible causes."""
    # Saving the cache is charged too, but not mentioned, because every run that reuses responses does it.
    charged = [row.phase for row in rows if row.phase in COSTS and row.phase != "cache to disk"]
    words = f", {' and '.join(charged)} charged" * bool(charged) + caveat
    return [f"Speedup of the {row.phase}{words}: {row.speedup}" for row in rows if row.speedup]


def numbers(found: Speedup | None) -> dict | None:
    return asdict(found) | {"told": found.told} if found else None


def rule(config: Config | None) -> str:
    """The rollout rule of a run: its name, a colon, and a sentence about the distribution that it samples from."""
    if config is None:
        return "unknown: the run's config.yaml is missing or unreadable."
    rollout = config.rollout
    if rollout.acceptance in ("judged", "routed"):
        what = "old text" if rollout.accepts_old_text else "the draft model's text"
        by = getattr(rollout, rollout.acceptance).by
        return (
            f"lossy: {what} is accepted where rollout.{rollout.acceptance}.by={by} allows, and keeps the distribution "
            "that it was sampled from."
        )
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
    """Data type of the weights that a run samples responses with; empty if unknown."""
    return rollout_dtype(config) if config else ""


def notes(own: RunRecords, pairing: Pairing | None) -> list[str]:
    """The caveats that a reader must know before quoting a number."""
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
    """A sentence that says why there are no control steps."""
    if config is None:
        return "No control steps, so no speedup was measured."
    if config.rollout.acceptance != "exact":
        return (
            "No speedup was measured: control steps compare with plain decoding, whose text a lossy rule does not "
            "write. Give baseline=DIR, a run with rollout.acceptance=off."
        )
    every = config.rollout.measure_every
    return f"No control steps, so no speedup was measured: with rollout.measure_every={every} the run had none."


def pair(own: RunRecords, baseline: RunRecords) -> Pairing:
    """Compares `own` with `baseline` and decides whether a speedup may be reported."""
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
    """The records of the rollouts that both runs timed, in the same order."""
    by_step = {record["step"]: record for record in rollouts(baseline)}
    own = [record for record in rollouts(steps) if record["step"] in by_step]
    return own, [by_step[record["step"]] for record in own]


def paired(steps: Sequence[dict], baseline: Sequence[dict]) -> list[Saving]:
    """Savings compared with a baseline run, over the rollouts that both timed: phases, totals and complete steps."""
    own, plain = matched(steps, baseline)
    if not own:
        return []
    before, after = ({**phases(side), **costs(side)} for side in (plain, own))
    both = zip(own, plain, strict=True)
    pairs = [Pair(record, rollout_s(record), rollout_s(other), step_s([record])) for record, other in both]
    rows = table(before, after, pairs)
    for key in ("reward", "update"):
        own_s, plain_s = ([total([record], f"timing_s/{key}") for record in side] for side in (own, plain))
        rows.append(saving(key, own_s, plain_s))
    own_s, plain_s = ([step_s([record]) for record in side] for side in (own, plain))
    return [*rows, saving("step, controls left out", own_s, plain_s, True)]


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
    """The differences between the machines of two runs, as `name: SECOND, not FIRST`; empty if one has no record."""
    here, there = first.machine or {}, second.machine or {}
    unlike = [name for name in SAME_MACHINE if name in here and name in there and _cut(here, name) != _cut(there, name)]
    return [f"{name}: {_plain(there[name])}, not {_plain(here[name])}" for name in unlike]


def _cut(found: dict, name: str):
    """The value; of GPUs only the name and memory, because the driver may differ."""
    return [", ".join(gpu.split(", ")[:2]) for gpu in found[name]] if name == "gpus" else found[name]


def _plain(value) -> str:
    return ("; ".join(value) or "none") if isinstance(value, list) else str(value)
