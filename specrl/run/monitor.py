"""Reports the progress of a run: metrics.jsonl (one JSON object per line) and a console line per step."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from specrl.results.records import EVALUATION_COST, METRICS_FILE, number, read_records, to_json
from specrl.results.speedup import flips
from specrl.rollout.durable import write_durably

ETA_STEPS = 20  # steps averaged for the ETA, enough to contain a control step at the default measure_every
PAUSED = 0.5  # a note is printed if a larger share of a rollout's passes skipped its available drafts
ALIKE = 5  # a note is printed after this many consecutive rollouts in which every prompt's rewards were equal


class Monitor:
    """Writes metrics.jsonl and reports on the console.

    Args:
        run_dir: the run's directory, created if absent. An existing metrics.jsonl is continued.
        total_steps: number of optimiser steps of the run, for the ETA.
        console: where to print; None prints to standard output.
        resumed_step: the step of the checkpoint that the run resumes from. Records of later steps are removed, because
            those steps are repeated; -1, for a run without a checkpoint, removes all. Truncated and unreadable lines
            are removed too.
        compares_groups: whether the loss compares the responses to one prompt, so that equal rewards deserve a warning.

    A metrics file that cannot be written is reported once and never stops the run.
    """

    def __init__(
        self,
        run_dir: str | Path,
        total_steps: int,
        console: Console | None = None,
        resumed_step: int = -1,
        compares_groups: bool = False,
    ) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self.total_steps = total_steps
        self.console = console or Console(highlight=False)
        self._recent: deque[float] = deque(maxlen=ETA_STEPS)
        self._truncated = False
        self._failed = False
        self._paused = False
        self._flipped = False
        self._compares_groups = compares_groups
        self._equal_rollouts = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._trim(resumed_step)

    def log(self, record: Mapping[str, Any]) -> None:
        """Appends the record of one optimiser step and prints its line. `record` is flat; its `step` begins at 1."""
        self._append(record)
        if (seconds := number(record, "timing_s/step")) is not None:
            self._recent.append(seconds)
        self.note(step_line(record, self.total_steps, self._eta(int(record["step"]))))
        if not self._flipped and (differing := flips([record])) and differing.count:
            self._flipped = True
            self.note(f"On this control step {differing.sentence()}. The report covers all control steps.")
        ratio = number(record, "spec/paused_ratio")
        if ratio is not None and (ratio > PAUSED) != self._paused:
            self._paused = not self._paused
            self.note(pause_line(record) if self._paused else "Speculation has resumed.")
        self._watch_rewards(record)

    def _watch_rewards(self, record: Mapping[str, Any]) -> None:
        """Warns once that nothing is learned after ALIKE consecutive rollouts with equal rewards for each prompt."""
        equal = number(record, "frac_reward_zero_std")
        if equal is None or not self._compares_groups or self._equal_rollouts >= ALIKE:
            return
        self._equal_rollouts = self._equal_rollouts + 1 if equal >= 1 else 0
        if self._equal_rollouts == ALIKE:
            self.note(alike_line(record, self.path.parent / "completions"))

    def log_eval(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one evaluation and prints its line.

        Args: step: the optimiser step that it follows, 0 before training; metrics: by key, such as `eval/reward`.
        """
        self._append({"step": step, **metrics})
        self.note(eval_line(step, metrics))

    def _trim(self, resumed_step: int) -> None:
        if not self.path.exists():
            return
        records, bad = read_records(self.path)
        kept = [to_json(record) + "\n" for record in records if record["step"] <= resumed_step]
        write_durably(self.path, "".join(kept).encode())
        if bad:
            self.note(f"{self.path}: dropped {bad} unreadable line{'s' * (bad > 1)}.")

    def _append(self, record: Mapping[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" * self._truncated + to_json(record) + "\n")
                file.flush()
                os.fsync(file.fileno())  # records must survive a power failure if a later checkpoint does
            self._truncated = False
        except OSError as error:
            self._truncated = True
            if not self._failed:
                self._failed = True
                self.note(f"{self.path} cannot be written ({error.strerror}); the report will have gaps.")

    def _eta(self, step: int) -> float | None:
        return sum(self._recent) / len(self._recent) * (self.total_steps - step) if self._recent else None

    def note(self, line: str) -> None:
        """Prints a line about the run, wrapped between words on a terminal and unwrapped in a log file."""
        self.console.print(escape(line), highlight=False, soft_wrap=not self.console.is_terminal)


def step_line(record: Mapping[str, Any], total_steps: int, eta_s: float | None = None) -> str:
    """The console line of one step. Fields that are absent or NaN are omitted. metrics.jsonl has the others.

    Example: Step 42/300 | 18.2 s | reward 0.61 | gen 7.9 s (2.9x) | reused 71% | ETA 1h18
    """
    speedup = number(record, "spec/speedup")
    measured = "" if speedup is None else f" ({speedup:.1f}x)"
    parts = (
        ("timing_s/step", lambda v: f"{v:.1f} s"),
        ("reward", lambda v: f"reward {v:.2f}"),
        ("timing_s/gen", lambda v: f"gen {v:.1f} s{measured}"),
        ("spec/ahead_ratio", lambda v: f"ahead {v:.0%}"),
        ("spec/reused_ratio", lambda v: f"reused {v:.0%}"),
    )
    shown = [show(value) for key, show in parts if (value := number(record, key)) is not None]
    eta = [] if eta_s is None else [f"ETA {duration(eta_s)}"]
    return " | ".join([f"Step {record['step']}/{total_steps}", *shown, *eta])


def eval_line(step: int, metrics: Mapping[str, Any]) -> str:
    """The console line of an evaluation. The number of failures is omitted if it is 0.

    Example: Eval at step 128 | reward 0.758 | length 105 | pass@1/2/4 0.758 0.828 0.875
    """
    values = {key.removeprefix("eval/"): number(metrics, key) for key in metrics if _of_policy(key)}
    values = {key: value for key, value in values.items() if value is not None and (value or key != "failed")}
    passes = {key.removeprefix("pass@"): f"{value:.3g}" for key, value in values.items() if key.startswith("pass@")}
    shown = [f"{key.removeprefix('mean_')} {value:.3g}" for key, value in values.items() if "pass@" not in key]
    shown += [f"pass@{'/'.join(passes)} {' '.join(passes.values())}"] if passes else []
    shown = shown if "reward" in values else ["no response could be scored", *shown]
    return " | ".join((f"Eval at step {step}", *shown))


def _of_policy(key: str) -> bool:
    return key.startswith("eval/") and key not in EVALUATION_COST


def pause_line(record: Mapping[str, Any]) -> str:
    """A note on why most passes of a rollout skipped speculation although drafts were available."""
    share = number(record, "spec/paused_ratio") or 0.0
    p = number(record, "spec/paused_acceptance") or 0.0
    needed = number(record, "spec/paused_needed") or 0.0
    reason = "they would have cost more time than they save"
    if p >= needed:
        reason = "when they were tried they saved no time"
    return (
        f"Speculation pauses: {share:.0%} of the rows' passes left out their drafts, because {reason}. The next draft "
        f"token is accepted with probability {p:.2f}, and at the measured costs a draft pays from {needed:.2f} on. "
        "Responses are the same, and drafts are tried again now and then."
    )


def alike_line(record: Mapping[str, Any], responses: Path) -> str:
    """A warning that recent rewards carry no learning signal, with remedies. Args: responses: their directory."""
    mean = "" if (value := number(record, "reward")) is None else f" (mean {value:.3g})"
    return (
        f"Nothing is learned: in the last {ALIKE} rollouts all responses to a prompt had the same reward{mean}, so "
        f"every advantage is 0. {responses} has responses with their rewards: does the reward score them as you would? "
        "If they are truncated, raise rollout.max_new_tokens; if they are alike, rollout.temperature; if all are "
        "wrong or all are right, use easier or harder prompts, a larger rollout.group_size, or a reward with partial "
        "credit."
    )


def duration(seconds: float) -> str:
    """Seconds in readable form: `45s`, `12m30`, `1h18`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}"
