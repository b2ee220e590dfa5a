"""Connects a trainer to the rollout package: sends weights to the engine, rolls out dataset rows and scores them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from specrl.rollout.control import Control
from specrl.rollout.engines.base import Engine
from specrl.rollout.keys import Visits, derive_key
from specrl.rollout.reduction import Metric, merged, seconds
from specrl.rollout.types import Row
from specrl.trainers import weights
from specrl.trainers.correction import measured_weights, overlong_penalty, padded
from specrl.trainers.peers import Peers
from specrl.trainers.scored import Scored, check_batch
from specrl.trainers.setup import Setup
from specrl.trainers.tool_rollouts import ToolRollouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerState

    from specrl.trainers.cotraining.trainer import DrafterTrainer

PROBE_PROMPTS = 16
"""First prompts of the data, the longest of which checks the weights of the engine."""


class Rollouts:
    """The rollouts of one process of a run: `collect`, then `finish`, once per rollout batch.

    Args:
        policy: returns the model as it is trained, adapters included, without wrappers for several processes.
        clock: returns the trainer's state, of which `global_step` and `epoch` are read.
        upcoming: returns this process's dataset rows of the next rollout batch, none at the last step. A wrong guess
            only costs time.

    Raises:
        RolloutError: the model is sharded over processes, and the engine cannot get all of it.
    """

    def __init__(
        self,
        setup: Setup,
        accelerator: Accelerator,
        policy: Callable[[], PreTrainedModel],
        clock: Callable[[], TrainerState],
        upcoming: Callable[[], Sequence[dict]] = tuple,
    ):
        self._setup = setup
        self._options = setup.trainer
        self._group_size = setup.rollout.group_size
        self._accelerator = accelerator
        self._policy = policy
        self._clock = clock
        self._upcoming = upcoming
        probe = max((setup.render(row) for row in islice(setup.dataset, PROBE_PROMPTS)), key=len)
        self._probe = probe if len(probe) > 1 else probe * 2  # the first token of a prompt has no log-prob
        self._dtype = torch.float32 if setup.trainer.precision == "fp32" else torch.bfloat16
        """The dtype of the engine's weights."""
        self.source = setup.make_rollout(self.policy)
        """The source of responses."""
        weights.check_shared(self.engine.own_weights, accelerator)
        self._ahead = any(gather_object([self.source.runs_ahead]))  # announcing is collective
        self._peers = Peers()
        strict = weights.exact_bits(self._dtype, accelerator.device, setup.rollout)
        self._control = Control(self.source, self._score_tokens, gather_object, strict=strict)
        self._visits = Visits()
        self._sent: int | None = None
        self._fields: dict[str, dict] = {}
        """Dataset rows of the step, by example id."""
        self._metrics: dict[str, Metric] = {}
        self._conversations = ToolRollouts(setup.tools, self.source, setup.max_turns) if setup.tools else None
        self.sampled_batch: Scored
        """Everything that the last `collect` rolled out."""
        self.train_batch: Scored
        """The rows of the last `collect` that are trained on."""
        self.drafter_trainer: DrafterTrainer | None = None
        """Trains the drafter of `rollout.drafter` next to the policy."""
        self.drafter: torch.nn.Module | None = None
        """A draft model in training, of which the engine holds a copy."""

    @property
    def policy(self) -> PreTrainedModel:
        """The model as it is trained, adapters included."""
        return self._policy()

    @property
    def engine(self) -> Engine:
        """The engine that generates the responses."""
        return self.source.engine

    @property
    def version(self) -> int:
        """The weight version, which is the number of optimiser steps taken."""
        return self._clock().global_step

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return int((self._clock().epoch or 0.0) + 1e-6)

    @property
    def batch_is_current(self) -> bool:
        """True while there was no update since the rollout, so that trainer and engine have the same weights."""
        return self.train_batch.batch.completions[0].version == self.version

    def sync(self) -> None:
        """Sends the current weights to the engine, unless it already has them."""
        if self._sent == self.version and self.engine.own_weights:
            return
        weights.send(self.engine, self.policy, self.version, self._probe, self._dtype, self.drafter)
        self._sent = self.version

    # Generation --------------------------------------------------------------------------------------------------

    def collect(self, inputs: list[dict]) -> Scored:
        """Rolls out and scores one response to each of this process's dataset rows.

        A group may continue in the next process. With dynamic sampling, some groups are replaced by groups of other
        dataset rows.
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

            refill = Refill(
                rounds=self._options.refill_rounds,
                group_size=self._group_size,
                dataset=self._setup.dataset,
                accelerator=self._accelerator,
                roll_out=self._roll_out,
            )
            seed = derive_key(self.source.seed, "refill", 0, self.version, "trainer")
            self.sampled_batch, self.train_batch, metrics = refill(self.sampled_batch, seed)
            self._note(metrics)
        return self.train_batch

    def _note(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = merged([self._metrics, metrics], Metric.later)

    def _roll_out(self, inputs: list[dict], first: int) -> Scored:
        """Rolls out and scores dataset rows, and adds the metrics to those of the step.

        Args:
            first: index of the first row among the rows of all processes.
        """
        self._fields |= {row["example_id"]: row for row in inputs}
        rows, sample_indices = self._rows(inputs, first)
        visits = self._per_row(rows, self._visits.next)
        announce = self._announcement() if self._ahead else lambda: None
        turns = None
        if self._conversations:
            conversations, turns, metrics = self._conversations.generate(
                rows, sample_indices, visits, self.version, announce
            )
            self._note(metrics)
            batch = turns.batch.select(range(len(rows)))
            batch.completions = [conversation.whole() for conversation in conversations]
            responses: list[list] = [conversation.messages for conversation in conversations]
        else:
            announce()
            with self._peers.batch(self.engine):
                batch = self.source.generate(rows, visit=visits, step=self.version, sample_indices=sample_indices)
            responses = [c.tokens for c in batch.completions]
        check_batch(batch, len(inputs), self.version)
        began = time.perf_counter()
        unpenalised, metrics = self._setup.score(inputs, responses)
        self._note(metrics | {"timing_s/reward": seconds(time.perf_counter() - began)})
        rewards = self._penalised(unpenalised, [len(c.tokens) for c in batch.completions])
        return Scored(inputs, rows, batch, rewards, unpenalised, turns)

    def _rows(self, inputs: Sequence[dict], first: int) -> tuple[list[Row], list[int]]:
        """The dataset rows as `Row`s, and their sample indices."""
        rows = [Row(row["example_id"], tuple(self._setup.render(row))) for row in inputs]
        return rows, [(first + i) % self._group_size for i in range(len(inputs))]

    def _announcement(self) -> Callable[[], None]:
        """Announces the next batch to the source of responses; of conversations, the first turns."""
        upcoming = self._upcoming()
        rows, sample_indices = self._rows(upcoming, self._accelerator.process_index * len(upcoming))
        visits = self._per_row(rows, self._visits.so_far)
        return lambda: self.source.announce(rows, visit=visits, sample_indices=sample_indices)

    @staticmethod
    def _per_row(rows: Sequence[Row], visits: Callable[[list[str]], list[int]]) -> list[int]:
        """The visit of each row. Args: visits: a method of Visits; it gets the example ids of all processes."""
        ids = gather_object([row.example_id for row in rows])
        by_id = dict(zip(ids, visits(ids), strict=True))
        return [by_id[row.example_id] for row in rows]

    def finish(self) -> dict[str, Metric]:
        """Stores the rollout's trajectories, runs the control rows that are due, and returns the rollout's metrics."""
        sampled = self.sampled_batch.generated
        batch = sampled.batch
        self._setup.keeping.keep(sampled, self.source, self.version, number=self.version)
        # a process that does not use a source still counts towards that source's share of all tokens
        for name in gather_object(list(batch.stats.sources)):
            batch.stats.sources.setdefault(name, (0, 0))
        metrics = self._metrics | self._control(sampled.rows, batch, sampled.rewards, step=self.version)
        metrics |= self._setup.keeping.stats(self.source)
        self._metrics = {}
        if self._control.measured:  # control rows use the engine's forward pass too, so they cannot detect a wrong one
            weights.check(self.engine, self.policy, self.version, self._probe)
        if self.drafter_trainer:
            responses = zip(sampled.rows, batch.completions, strict=True)
            self.drafter_trainer.observe([(row.prompt, c.tokens) for row, c in responses])
        return metrics

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to keep its control steps and its keys unchanged, as JSON types."""
        return {"rollouts": self._control.rollouts, "visits": self._visits.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Resumes from the `state` of a checkpoint."""
        self._control.rollouts = state["rollouts"]
        self._visits = Visits(state["visits"])

    # Rewards -----------------------------------------------------------------------------------------------------

    def _penalised(self, totals: Sequence[float | None], lengths: Sequence[int]) -> list[float | None]:
        """Total rewards with the overlong penalty. Args: lengths: in tokens, those of tools included, as in the cap."""
        cap = self.source.config.max_new_tokens
        if not (buffer := self._options.overlong_tokens(cap)):
            return list(totals)
        paired = zip(totals, lengths, strict=True)
        return [None if total is None else total + overlong_penalty(length, cap, buffer) for total, length in paired]

    def _score_tokens(self, rows: Sequence[Row], responses: Sequence[list[int]]) -> list[float | None]:
        """Rewards of control rows, which are not logged as rewards of the step."""
        totals, _ = self._setup.score([self._fields[row.example_id] for row in rows], responses)
        return self._penalised(totals, [len(ids) for ids in responses])

    # Old log-probs and corrections -------------------------------------------------------------------------------

    @property
    def old_from_engine(self) -> bool:
        """True if the engine's log-probs are pi_old, False if the trainer computes pi_old."""
        source = self._options.old_logprobs
        return source == "engine" or (source == "auto" and self.source.config.lossy)

    def importance(
        self, rollout_logprobs: torch.Tensor, mask: torch.Tensor, policy_logprobs: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """Weights [B, T] of tokens that another distribution or engine sampled; None if no correction is needed.

        Args:
            rollout_logprobs: the engine's log-probs of the rows that are trained on [B, T].
            mask: 1 for tokens that the policy sampled [B, T].
            policy_logprobs: returns the trainer's log-probs [B, T]; called only if they are needed.
        """
        options, config = self._options, self.source.config
        rounded_copy = options.precision == "bf16" and self.engine.own_weights
        other_numerics = rounded_copy or config.engine != "transformers"
        if config.lossy:
            logp = rollout_logprobs
            completions = self.train_batch.batch.completions
            behaviour = padded([c.behaviour_logprobs for c in completions], rollout_logprobs)
        elif other_numerics and not self.old_from_engine and options.correction != "none":
            logp = policy_logprobs()
            behaviour = rollout_logprobs
        else:
            return None
        weights, metrics = measured_weights(logp, behaviour, mask, options.correction, options.correction_cap)
        self._note(metrics)
        return weights
