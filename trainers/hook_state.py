"""What ReuseRollouts keeps in TRL's checkpoints, so that noise stays fresh and reuse goes on when a script resumes."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback, TrainerState, TrainingArguments

from rollout.cache import TrajectoryCache
from rollout.durable import write_durably
from rollout.keys import Visits
from rollout.speculative import SpeculativeRollout
from rollout.types import RolloutError

Domain = Literal["rollout", "evaluation"]
COUNTS = "visits.json"
MANY = 1 << 20
"""More often than this no prompt is evaluated between two optimiser steps."""

logger = logging.getLogger(__name__)


class Asked:
    """How often each prompt was asked for, in training and in evaluation; see Visits."""

    def __init__(self):
        self._first: dict[Domain, int] = {"rollout": 0, "evaluation": 0}
        self._visits: dict[Domain, Visits] = {"rollout": Visits(), "evaluation": Visits()}

    def next(self, domain: Domain, example_ids: Sequence[str]) -> list[int]:
        """A visit number for each row that its prompt never had; `example_ids` are those of all processes."""
        return [self._first[domain] + visit for visit in self._visits[domain].next(example_ids)]

    def skip(self, step: int, passes: int) -> None:
        """Begins behind every number that a run can have used within `step` optimiser steps of `passes` passes.

        A pass asks for a batch at most once, so no prompt was asked for more often than there were passes. Steps before
        an earlier resume are taken to have had as many.
        """
        self._first = {"rollout": step * passes, "evaluation": (step + 1) * MANY}

    def state(self) -> dict[str, Any]:
        """What `restore` takes, as JSON types."""
        return {"first": self._first, "visits": {name: visits.state() for name, visits in self._visits.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        self._first = state["first"]
        self._visits = {name: Visits(counts) for name, counts in state["visits"].items()}


class SaveReuse(TrainerCallback):
    """Adds visits and trajectories to every checkpoint that TRL writes."""

    def __init__(self, rollout: SpeculativeRollout, asked: Asked):
        self._rollout, self._asked = rollout, asked

    def on_save(self, args: TrainingArguments, state: TrainerState, control, **kwargs) -> None:
        home = _home(args, state)
        if not state.is_world_process_zero or not home.parent.is_dir():  # a search of options saves elsewhere
            return
        if (cache := self._rollout.cache) is not None:
            cache.try_save(home, state.global_step, self._rollout.config.cache.on_write_error)
        saved = {"tokens": state.num_input_tokens_seen, **self._asked.state()}
        try:
            home.mkdir(exist_ok=True)
            write_durably(home / COUNTS, json.dumps(saved).encode())  # last: a folder without it is not complete
        except OSError as error:
            raise RolloutError(f"{home} cannot be written: {error}. Free some space and resume") from error


def read_state(args: TrainingArguments, state: TrainerState) -> dict[str, Any] | None:
    """Asked's state in the checkpoint that `state` was read from; None, with a warning, where it has none.

    The trainer does not say which folder it resumed from. The one of this step in its output directory is taken when
    its run had seen as many tokens by then.
    """
    path = _home(args, state) / COUNTS
    try:
        found = json.loads(path.read_bytes())
        if found["tokens"] == state.num_input_tokens_seen:
            return {"first": found["first"], "visits": found["visits"]}
        why = "is of another run"
    except FileNotFoundError:
        why = "is not there"
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"cannot be read ({error})"
    logger.warning(
        "Resumed at step %d, and '%s' %s: reuse begins anew, and so do visits, behind all that were possible so far.",
        state.global_step,
        path,
        why,
    )
    return None


def load_trajectories(args: TrainingArguments, state: TrainerState, rollout: SpeculativeRollout) -> None:
    """Takes the trajectories of that checkpoint; without them it begins with none."""
    if (cache := rollout.cache) is not None:
        rollout.cache = TrajectoryCache.load(
            _home(args, state),
            cache.fingerprint,
            cache.vocab_size,
            cache.eos_ids,
            max_step=state.global_step,
            max_mb=rollout.config.cache.max_mb,
        )


def _home(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "specrl"
