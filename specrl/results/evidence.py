"""Claims that a run's metrics support: savings, rollouts ahead, the rollout rule, and the notes that limit them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from specrl.config.options import plain
from specrl.config.rules import differences
from specrl.config.schema import Config
from specrl.results.records import METRICS_FILE, RunRecords, counted, mean, number, total
from specrl.results.savings import COSTS, Pair, Saving, control_pairs, later, matched, rollouts, saving, savings, step_s
from specrl.results.speedup import FEWEST, flips, half_width
from specrl.run.policy import rollout_dtype

SAME_MACHINE = ("cpu", "cores", "usable_cores", "threads", "gpus")
VERSIONS = ("torch", "transformers", "vllm", "ray")
"""Packages whose version decides how long a step takes."""
MAY_DIFFER = re.compile(
    r"name|output_dir|resume|report\..*|trainer\.((save|keep|eval|log)_.*|drafter\..*)"
    r"|rollout\.(acceptance|ahead|fill|sources|draft_tokens|drafter|twin|measure_every|cache\..*)"
)
"""Options that may differ between a run and its baseline: they configure speculation or do not affect a step's time."""
LENGTH_GAP = 0.02  # a larger relative difference in mean response length can fake or hide a speedup


@dataclass(frozen=True)
class Comparison:
    """Rollouts timed with specrl and with plain decoding, on control steps or by a baseline run."""

    title: str
    rows: list[Saving]
    caveat: str = ""
    """Names other possible causes of a difference."""

    @property
    def claims(self) -> list[str]:
        """A sentence for each speedup."""
        # Saving the cache is charged too, but not mentioned, because every run that reuses responses does it.
        charged = [row.phase for row in self.rows if row.phase in COSTS and row.phase != "cache to disk"]
        words = f", {' and '.join(charged)} charged" * bool(charged) + self.caveat
        return [f"Speedup of the {row.phase}{words}: {row.speedup}" for row in self.rows if row.speedup]

    def shown(self) -> list[Saving]:
        """The rows without phases whose seconds round to 0."""
        return [row for row in self.rows if row.speedup or any(float(cell) for cell in row.cells()[1:4])]

    def summary(self) -> dict:
        """The content for report.json."""
        return {"title": self.title, "claims": self.claims, "savings": [row.summary() for row in self.rows]}


def on_control_steps(steps: Sequence[dict]) -> Comparison | None:
    """The savings on the control steps of a run; None without any."""
    pairs = control_pairs(steps)
    title = f"Measured on {counted(len(pairs), 'control step')} of {counted(len(rollouts(steps)), 'rollout')}"
    return Comparison(title, savings(pairs)) if pairs else None


def against_baseline(run: RunRecords, baseline: RunRecords) -> tuple[Comparison | None, list[str]]:
    """The savings compared with a baseline run, None where a speedup may not be reported, and notes that say why."""
    pairs = matched(run.steps, baseline.steps)
    refusals = [*_refusals(run, baseline, len(pairs))]
    notes = [*refusals]
    differing = _differing(run, baseline)
    if differing:
        notes.append(f"The runs differ in more than the rollout rule: {', '.join(differing)}.")
    most = max(len(rollouts(side.steps)) for side in (run, baseline))
    if 0 < len(pairs) < most:
        notes.append(f"{len(pairs)} of {most} rollouts are paired: those that both runs timed.")
    if gap := _length_gap(pairs):
        notes.append(f"Part of the difference in time is a difference in length: {gap}.")
        differing.append(gap)
    if refusals:
        return None, notes
    caveat = f", perhaps not by speculation alone ({', '.join(differing)})" if differing else ""
    return Comparison(f"Paired with {baseline.path}, {counted(len(pairs), 'step')}", savings(pairs), caveat), notes


def _refusals(run: RunRecords, baseline: RunRecords, pairs: int) -> Iterator[str]:
    """Sentences that say why there is no speedup; none if there is one."""
    if not pairs:
        yield f"The runs have no timed step in common, so nothing is paired with {baseline.path}."
    if run.config and run.config.rollout.acceptance == "off":
        yield "This run does not speculate (rollout.acceptance=off), so it has no speedup."
    if baseline.config and baseline.config.rollout.acceptance != "off":
        acceptance = baseline.config.rollout.acceptance
        yield f"The baseline speculates (rollout.acceptance={acceptance}), so there is no speedup over plain decoding."
    if other := other_machine(run, baseline):
        yield f"The baseline ran on another machine ({'; '.join(other)}), so seconds do not compare."


def other_machine(run: RunRecords, baseline: RunRecords) -> list[str]:
    """What differs between the machines of two runs; empty if one has no record of its machine."""
    here = run.machine or {}
    there = baseline.machine or {}
    both = [name for name in SAME_MACHINE if name in here and name in there]
    return [f"{name}: {plain(there[name])}, not {plain(here[name])}" for name in both if here[name] != there[name]]


def _differing(run: RunRecords, baseline: RunRecords) -> list[str]:
    """Other differences that can change the seconds, as `key: baseline -> run`."""
    differing = ["settings unknown"]
    if run.config and baseline.config:
        changes = differences(baseline.config, run.config)
        differing = [str(c) for c in changes if c.key != "name" and (c.matters or not MAY_DIFFER.fullmatch(c.key))]
    if run.machine is None or baseline.machine is None:
        return [*differing, "machine unknown"]
    here = run.machine["versions"]
    there = baseline.machine["versions"]
    changed = [name for name in VERSIONS if there.get(name) != here.get(name)]
    return differing + [f"{name}: {there.get(name)} -> {here.get(name)}" for name in changed]


def _length_gap(pairs: Sequence[Pair]) -> str:
    here, there = (mean([pair[side] for pair in pairs], "completions/mean_length") for side in (0, 1))
    if here and there and abs(here / there - 1) > LENGTH_GAP:
        return f"mean response length: {there:.1f} -> {here:.1f} tokens"
    return ""


def ahead(run: RunRecords, baseline: RunRecords | None) -> dict | None:
    """What rollouts ahead did, for report.json; None if there were none.

    Means over all rollouts but the first, before which nothing is generated ahead. Times exclude control rows.

    Args: baseline: a run to compare steps with; used if it has rollout.ahead=off and ran on the same machine.
    """
    steps = [record for record in rollouts(run.steps) if number(record, "spec/ahead_ratio") is not None][1:]
    if not steps or not step_s(steps):
        return None
    names = ("ahead_ratio", "ahead_done_ratio", "ahead_unchanged_ratio")
    result: dict[str, Any] = {name: mean(steps, f"spec/{name}") for name in names}
    tokens, done, unchanged = (value or 0.0 for value in result.values())
    sentence = (
        f"Rollouts ahead: {tokens:.0%} of the tokens had been generated ahead. {done:.0%} of the rows "
        f"had ended before their rollout began, and {unchanged:.0%} were accepted unchanged."
    )
    if baseline and baseline.config and baseline.config.rollout.ahead == "off" and not other_machine(run, baseline):
        steps_alone = saving("step", matched(steps, baseline.steps), lambda record: step_s([record]), claim=True)
        sentence += f" Speedup of the step over {baseline.path}, without them: {steps_alone.speedup}."
        result["step"] = steps_alone.summary()
    else:
        sentence += " To measure what they save, give the same run with rollout.ahead=off as baseline= of the report."
    return result | {"sentence": sentence}


def evaluations(evals: Sequence[dict]) -> dict | None:
    """What the evaluations that had drafts cost, for report.json; None if there were none.

    Plain decoding takes as many passes as a response has tokens, and there was no such decoding to time.
    """
    drafted = [record for record in evals if number(record, "eval/hit_rate")]
    if not drafted:
        return None
    names = {"passes_per_row": "eval/passes_per_row", "plain_passes_per_row": "eval/mean_length"}
    names |= {"passes_max": "eval/passes_max", "plain_passes_max": "eval/max_length"}
    result = {name: mean(drafted, key) for name, key in names.items()}
    result |= {"count": len(drafted), "of": len(evals), "gen_s": total(drafted, "eval/gen_s")}
    sentence = (
        f"Evaluations with drafts ({len(drafted)} of {len(evals)}): {result['passes_per_row']:.1f} passes a row, plain "
        f"decoding {result['plain_passes_per_row']:.1f}"
    )
    return result | {"sentence": sentence}


def reward_difference(run: RunRecords, baseline: RunRecords | None) -> dict | None:
    """The mean reward minus that of a run with the same seed, for report.json; None without such a run.

    Blocks of the common steps are the sample. Both runs draw with the same noise, which cancels in part.
    """
    if not baseline or not run.config or not baseline.config or run.config.seed != baseline.config.seed:
        return None
    by_step = {record["step"]: number(record, "reward") for record in baseline.steps}
    pairs = [(number(record, "reward"), by_step.get(record["step"])) for record in run.steps]
    differences = [here - there for here, there in pairs if here is not None and there is not None]
    if len(differences) < FEWEST:
        return None
    n = len(differences)
    mean = fmean(differences)
    half = half_width([difference - mean for difference in differences]) / n
    sentence = (
        f"Reward minus the baseline's: {mean:+.3f} (95 % interval {mean - half:+.3f} to {mean + half:+.3f}, "
        f"{counted(n, 'step')})"
    )
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": n, "sentence": sentence}


def advice(run: RunRecords, measured: Comparison | None) -> dict | None:
    """Whether drafts pay for this policy and what to switch on, for report.json; None if control steps do not tell."""
    timed = (
        [row.speedup for row in measured.rows if row.speedup and row.phase.startswith("rollout")] if measured else []
    )
    if not timed or timed[0].low is None:
        return None
    if timed[0].low > 1:
        return {"pays": True, "sentence": "Drafts pay for this policy."}
    known = [mean(later(run.steps), key) for key in ("entropy", "spec/paused_acceptance", "spec/paused_needed")]
    why = ""
    if None not in known:
        entropy, accepted, needed = known
        why = (
            f" At an entropy of {entropy:.2f} nats a draft token is accepted with probability {accepted:.2f}, and pays "
            f"from {needed:.2f} on."
        )
    sentence = (
        f"Drafts do not make these rollouts faster.{why} What bounds text under the same key is the change of the "
        "weights; it comes from rollouts ahead, or from rollout.twin in a sweep of one seed. To time both: "
        f"python -m specrl.bench config={run.path}/config.yaml"
    )
    return {"pays": False, "sentence": sentence}


def rule(config: Config | None) -> str:
    """The rollout rule of a run: its name, a colon, and a sentence about the distribution that it samples from."""
    if config is None:
        return "unknown: the run's config.yaml is missing or unreadable."
    rollout = config.rollout
    if rollout.acceptance in ("judged", "routed"):
        source = "old text" if rollout.accepts_old_text else "the draft model's text"
        by = "the judge" if rollout.acceptance == "judged" else f"rollout.routed.by={rollout.routed.by}"
        return f"lossy: {source} is accepted where {by} allows, and follows the distribution that sampled it."
    if rollout.acceptance == "off":
        return "off: plain decoding without speculation."
    if rollout.acceptance == "lenient":
        return f"lenient, l={rollout.lenience:g}: SPEC-RL as published; biased towards the stored text."
    if not rollout.replay:
        return "exact, replay=0: the tokens that plain decoding samples, with fresh noise at every visit."
    return (
        f"exact, replay={rollout.replay:g}: the tokens that plain decoding samples with the same keys; replayed rows "
        "are not independent of the weights, and spec/reuse_gap measures what that does."
    )


def notes(run: RunRecords, measured: bool) -> list[str]:
    """The caveats that a reader must know before quoting a number. Args: measured: whether there is any Comparison."""
    lines = []
    steps = run.steps
    config = run.config
    if run.finished is False:
        lines.append(f"The run is unfinished; its last step is {run.last['step']}.")
    if run.unreadable:
        lines.append(f"{counted(run.unreadable, 'unreadable line')} of {METRICS_FILE} left out.")
    if not measured:
        if config is None or config.rollout.acceptance == "exact":
            every = f": rollout.measure_every={config.rollout.measure_every}" if config else ""
            lines.append(f"No speedup was measured, because the run had no control steps{every}.")
        elif config.rollout.acceptance != "off":
            lines.append(
                "No speedup was measured: control steps compare with plain decoding, whose text a lossy rule does not "
                "write. Give baseline=DIR, a run with rollout.acceptance=off."
            )
    if not later(steps) and not any(number(record, "spec/hit_rate") for record in steps):
        lines.append("No step is from epoch 2 on, so no prompt had old text of its own to draft from.")
    if (differing := flips(steps)) and differing.count:
        dtype = rollout_dtype(config) if config else ""
        lines.append(f"On control steps {differing.sentence(dtype)}.")
    if lost := total(steps, "reward/failed"):
        lines.append(f"{counted(lost, 'response')} got no reward and took no part in the update.")
    return lines
