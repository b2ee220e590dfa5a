"""What stands between a trainer and the rollout package: weights to the engine, rows to responses, responses to
rewards."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from specrl.rollout.config import RolloutConfig
from specrl.rollout.control import Control
from specrl.rollout.engines.base import Engine
from specrl.rollout.keys import Visits, derive_key
from specrl.rollout.reduction import Metric, merged, seconds
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import Row
from specrl.trainers import weights
from specrl.trainers.config import TrainerConfig
from specrl.trainers.scored import Scored, check_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerState

    from specrl.trainers.companions import Companion

Score = Callable[[Sequence[dict], Sequence[list[int]]], tuple[list[float | None], dict[str, Metric]]]
"""Rewards of (dataset rows, responses as token ids): the total per row, None where it failed, and metrics to log."""


@dataclass(frozen=True)
class Setup:
    """What a run gives to the rollouts of its trainer."""

    score: Score
    render: Callable[[dict], list[int]]
    """Prompt of a dataset row as token ids."""
    dataset: Sequence[dict]
    """Rows that are trained on; the first one's prompt is what engine and trainer must agree on."""
    make_rollout: Callable[[PreTrainedModel], SpeculativeRollout]
    """The source of responses, given the policy as it is trained (adapters included)."""
    rollout: RolloutConfig
    trainer: TrainerConfig


class Rollouts:
    """The rollouts of one process of a run: `collect`, then `finish`, once per rollout batch.

    Args:
        setup, accelerator: of the run.
        policy: gives the model as it is trained, adapters included, not wrapped for several processes.
        clock: gives the trainer's progress, of which `global_step` and `epoch` are read.
        upcoming: gives this process's dataset rows of the rollout batch after the present one, none at the last step.
            A wrong guess costs time only.

    Raises:
        RolloutError: the engine would decode with a model of which each process holds a part.
    """

    def __init__(
        self,
        setup: Setup,
        accelerator: Accelerator,
        policy: Callable[[], PreTrainedModel],
        clock: Callable[[], TrainerState],
        upcoming: Callable[[], Sequence[dict]] = tuple,
    ):
        self._setup, self._options, self._group_size = setup, setup.trainer, setup.rollout.group_size
        self._accelerator, self._policy, self._clock, self._upcoming = accelerator, policy, clock, upcoming
        self.exchange: Callable[[list], list] = gather_object if accelerator.num_processes > 1 else list
        """Turns a list of this process into that of all processes; collective."""
        self._probe = setup.render(setup.dataset[0])
        self._dtype = torch.float32 if setup.trainer.precision == "fp32" else torch.bfloat16
        """Of the engine's weights."""
        self.exact_bits = self._dtype == torch.float32 and accelerator.device.type == "cpu"
        """Equal passes give equal bits."""
        self.source = setup.make_rollout(self.policy)
        """What the responses come from."""
        weights.check_shared(self.engine.own_weights, accelerator)
        self._ahead = any(self.exchange([self.source.runs_ahead]))  # announcing takes all processes
        whole_law = (setup.rollout.top_p, setup.rollout.top_k) == (1.0, 0)  # rounding can move the edge of a cut one
        strict = self.exact_bits and whole_law
        self._control = Control(self.source, self._score_tokens, self.exchange, strict=strict)
        self._visits = Visits()
        self._sent: int | None = None
        self._fields: dict[str, dict] = {}
        """Dataset rows of the step, by example id."""
        self._metrics: dict[str, Metric] = {}
        self.sampled_batch: Scored
        """All that `collect` rolled out last."""
        self.train_batch: Scored
        """What of it is trained on."""
        self.companions: dict[str, Companion] = {}
        """What is trained beside the policy, by the name that checkpoints have for it."""
        self.drafter: torch.nn.Module | None = None
        """A draft model in training, of which the engine has a copy."""

    @property
    def policy(self) -> PreTrainedModel:
        """The model as it is trained, adapters included."""
        return self._policy()

    @property
    def engine(self) -> Engine:
        """What generates."""
        return self.source.engine

    @property
    def version(self) -> int:
        """Weight version: optimiser steps taken."""
        return self._clock().global_step

    @property
    def epoch(self) -> int:
        """Whole epochs taken."""
        return int((self._clock().epoch or 0.0) + 1e-6)

    @property
    def batch_is_current(self) -> bool:
        """True while no update was made since the rollout, so that trainer and engine describe the same weights."""
        return self.train_batch.batch.completions[0].version == self.version

    def sync(self) -> None:
        """Brings the engine to the current weights; costs nothing when it has them."""
        if self._sent == self.version and self.engine.own_weights:
            return
        weights.send(self.engine, self.policy, self.version, self._probe, self._dtype, self.drafter)
        self._sent = self.version

    # A rollout ---------------------------------------------------------------------------------------------------

    def collect(self, inputs: list[dict]) -> Scored:
        """One scored response to each of this process's dataset rows, whose groups may go on in the next process.

        With dynamic sampling some groups are then of other dataset rows than was asked for.
        """
        first = self._accelerator.process_index * len(inputs)
        began = time.perf_counter()
        self.sync()
        if self.engine.own_weights:
            self._note({"timing_s/sync": seconds(time.perf_counter() - began)})
        self._fields = {}
        self.sampled_batch = self.train_batch = self._roll_out(inputs, first)
        if self._options.refill_rounds:
            from specrl.trainers.refill import Refill

            refill = Refill(self._options.refill_rounds, self._group_size, self.exchange, self._roll_out)
            order = derive_key(self.source.seed, "refill", 0, self.version, "trainer")
            self.sampled_batch, self.train_batch, metrics = refill(
                self.sampled_batch, self._accelerator, self._setup.dataset, order
            )
            self._note(metrics)
        return self.train_batch

    def _note(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = merged([self._metrics, metrics], Metric.later)

    def _roll_out(self, inputs: list[dict], first: int) -> Scored:
        """Rolls out and scores some dataset rows, and adds what that cost to the step's metrics.

        Args: first: place of the first row among those of all processes.
        """
        self._fields |= {row["example_id"]: row for row in inputs}
        rows, sample_indices = self._rows(inputs, first)
        visits = self._visit(rows)
        if self._ahead:
            self._announce(first)
        batch = self.source.generate(rows, visit=visits, step=self.version, sample_indices=sample_indices)
        check_batch(batch, len(inputs), self.version)
        began = time.perf_counter()
        responses = [c.tokens for c in batch.completions]
        totals, metrics = self._setup.score(inputs, responses)
        earned = [None if c.failure else total for c, total in zip(batch.completions, totals, strict=True)]
        self._note(metrics | {"timing_s/reward": seconds(time.perf_counter() - began)})
        return Scored(inputs, rows, batch, self._penalised(earned, responses), earned)

    def _rows(self, inputs: Sequence[dict], first: int) -> tuple[list[Row], list[int]]:
        """Dataset rows as the rollout package has them, and the sample of each."""
        rows = [Row(row["example_id"], tuple(self._setup.render(row))) for row in inputs]
        return rows, [(first + i) % self._group_size for i in range(len(inputs))]

    def _announce(self, first: int) -> None:
        """Tells the source of responses which batch comes next, as far as is known before this one is there."""
        rows, sample_indices = self._rows(self._upcoming(), first)
        asked = self.exchange([row.example_id for row in rows])
        seen = dict(zip(asked, self._visits.so_far(asked), strict=True))
        self.source.announce(rows, visit=[seen[row.example_id] for row in rows], sample_indices=sample_indices)

    def _visit(self, rows: Sequence[Row]) -> list[int]:
        """How often the prompt of each row was rolled out before, by any process; this is one more visit to it."""
        asked = self.exchange([row.example_id for row in rows])
        seen = dict(zip(asked, self._visits.next(asked), strict=True))
        return [seen[row.example_id] for row in rows]

    def finish(self) -> dict[str, Metric]:
        """Stores what was rolled out, runs the control rows that are due, and returns the rollout's metrics."""
        got, cache = self.sampled_batch, self.source.cache
        if cache is not None:
            entries = self.source.entries(got.rows, got.batch, step=self.version, rewards=got.rewards)
            with got.batch.charge_store():
                cache.merge(self.exchange(entries))
        for name in self.exchange(list(got.batch.stats.sources)):  # a share of all tokens needs every process's
            got.batch.stats.sources.setdefault(name, (0, 0))
        metrics = self._metrics | self._control(got.rows, got.batch, got.rewards, step=self.version)
        metrics |= cache.stats() if cache is not None else {}
        self._metrics = {}
        if self._control.measured:  # plain decoding takes the engine's path too, and would not tell if it is wrong
            weights.check(self.engine, self.policy, self.version, self._probe)
        done = [(row.prompt, c) for row, c in zip(got.rows, got.batch.completions, strict=True) if not c.failure]
        for companion in self.companions.values():
            companion.observe([(prompt, c.tokens) for prompt, c in done], self.version, got.batch.stats)
        return metrics

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to measure at the same steps and to derive the same keys, as JSON types."""
        return {"rollouts": self._control.rollouts, "visits": self._visits.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from `state` of a checkpoint."""
        self._control.rollouts, self._visits = state["rollouts"], Visits(state["visits"])

    # Rewards -----------------------------------------------------------------------------------------------------

    def _penalised(self, totals: Sequence[float | None], responses: Sequence[list[int]]) -> list[float | None]:
        """Total rewards, those of overlong responses lowered."""
        cap = self.source.config.max_new_tokens
        if not (buffer := self._options.overlong_tokens(cap)):
            return list(totals)
        from specrl.trainers.correction import overlong_penalty

        paired = zip(totals, responses, strict=True)
        return [None if total is None else total + overlong_penalty(len(ids), cap, buffer) for total, ids in paired]

    def _score_tokens(self, rows: Sequence[Row], responses: Sequence[list[int]]) -> list[float | None]:
        """Rewards of control rows; they are not logged as the step's rewards."""
        totals, _ = self._setup.score([self._fields[row.example_id] for row in rows], responses)
        return self._penalised(totals, responses)

    # Old log-probs and corrections -------------------------------------------------------------------------------

    @property
    def old_from_engine(self) -> bool:
        """True when the engine's log-probs are pi_old, False when the trainer computes its own."""
        asked = self._options.old_logprobs
        return asked == "engine" or (asked == "auto" and self.source.config.lossy)

    def importance(
        self, drawn: torch.Tensor, mask: torch.Tensor, own: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """Weights [B, T] of tokens that another law or another engine drew, by `trainer.correction`; None needs none.

        Args:
            drawn: the engine's log-probs of the batch [B, T].
            mask: 1 for response tokens [B, T].
            own: gives the trainer's log-probs [B, T] when they are needed.
        """
        config, options = self.source.config, self._options
        own_copy = options.precision == "bf16" and self.engine.own_weights
        other_numerics = own_copy or config.engine != "transformers"
        if not config.lossy and (not other_numerics or self.old_from_engine or options.correction == "none"):
            return None
        from specrl.trainers.correction import measured_weights, padded

        if config.lossy:
            logp, behaviour = drawn, padded([c.behaviour_logprobs for c in self.train_batch.batch.completions], drawn)
        else:
            logp, behaviour = own(), drawn
        ratios, metrics = measured_weights(logp, behaviour, mask, options.correction, options.correction_cap)
        self._note(metrics)
        return ratios
