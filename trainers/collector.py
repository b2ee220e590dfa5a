"""What every trainer does around its update: weights to the engine, rows to responses, responses to rewards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from rollout.config import RolloutConfig
from rollout.engines.base import Engine
from rollout.noise import derive_key
from rollout.speculative import SpeculativeRollout
from rollout.types import RolloutBatch, RolloutError, Row
from trainers import weights
from trainers.advantages import overlong_penalty
from trainers.config import TrainerConfig
from trainers.drafter import DrafterTrainer
from trainers.judge_refit import JudgeRefit
from trainers.losses import correction_weights
from trainers.metrics import across_processes
from trainers.refill import Scored, refill
from trainers.stage import RolloutStage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainerState

    from rollout.cache import TrajectoryCache

Score = Callable[[Sequence[dict], Sequence[str]], tuple[list[float | None], dict[str, float]]]
"""Rewards of (dataset rows, response texts): the total per row, None where it failed, and metrics to log."""


@dataclass(frozen=True)
class Setup:
    """What a run gives to the rollouts of its trainer.

    score: rewards of dataset rows and their responses.
    render: prompt of a dataset row as token ids.
    make_engine: the rollout engine, given the policy as it is trained (adapters included).
    cache: trajectories of earlier epochs; None reuses nothing.
    rollout, trainer, seed: the run's options.
    """

    score: Score
    render: Callable[[dict], list[int]]
    make_engine: Callable[[torch.nn.Module], Engine]
    cache: TrajectoryCache | None
    rollout: RolloutConfig
    trainer: TrainerConfig
    seed: int


class Collector:
    """Collects the rollouts of one process of a run: `collect`, then `finish`, once per rollout batch.

    Args:
        engine: produces the responses.
        setup, accelerator: of the run.
        policy: gives the model as it is trained, adapters included, not wrapped for several processes.
        state: gives the trainer's progress, of which `global_step` and `epoch` are read.
        tokenizer: decodes responses.
        dataset: rows that further prompts are taken from; the first one's prompt is what engine and trainer must agree
            on.
    """

    def __init__(
        self,
        engine: Engine,
        setup: Setup,
        accelerator: Accelerator,
        policy: Callable[[], torch.nn.Module],
        state: Callable[[], TrainerState],
        tokenizer: PreTrainedTokenizerBase,
        dataset: Sequence[dict],
    ):
        self._policy, self._accelerator, self._state = policy, accelerator, state
        self._score, self._render, self._tokenizer, self._dataset = setup.score, setup.render, tokenizer, dataset
        self._probe, self._seed = setup.render(dataset[0]), setup.seed
        self._options, self._group_size = setup.trainer, setup.rollout.group_size
        self._whole: Scored | None = None
        self._fields: dict[str, dict] = {}
        """Dataset rows of the step, by example id."""
        self._metrics: dict[str, float] = {}
        self._sent: int | None = None
        self.last: Scored | None = None
        """What was collected last, as it is trained on."""
        self._dtype = torch.float32 if setup.trainer.precision == "fp32" else torch.bfloat16
        """Of the engine's weights."""
        self.exact_bits = self._dtype == torch.float32 and accelerator.device.type == "cpu"
        """Equal passes give equal bits."""
        self._exchange = gather_object if accelerator.num_processes > 1 else lambda entries: entries
        self.stage = RolloutStage(
            SpeculativeRollout(engine, setup.cache, setup.rollout, setup.seed),
            self._score_tokens,
            strict=self.exact_bits
            and (setup.rollout.top_p, setup.rollout.top_k) == (1.0, 0),  # rounding can move the edge of the kept set
            exchange=self._exchange,
        )
        self.cotraining = self._cotraining(setup.seed) if setup.trainer.drafter.train else None
        self.refit: JudgeRefit | None = None

    @property
    def engine(self) -> Engine:
        """What the rollouts come from."""
        return self.stage.rollout.engine

    @property
    def version(self) -> int:
        """Weight version: optimiser steps taken."""
        return self._state().global_step

    @property
    def epoch(self) -> int:
        """Whole epochs taken."""
        return int((self._state().epoch or 0.0) + 1e-6)

    @property
    def batch_is_current(self) -> bool:
        """True while no update was made since the rollout, so that trainer and engine describe the same weights."""
        return self.last is not None and self.last.batch.completions[0].version == self.version

    def sync(self) -> None:
        """Brings the engine to the current weights; costs nothing when it has them."""
        engine = self.engine
        if self._sent == self.version and engine.own_weights:
            return
        began = time.perf_counter()
        weights.send(engine, self._policy(), self.version, self._probe, self._dtype)
        self._sent = self.version
        if engine.own_weights:
            self._metrics["timing_s/sync"] = time.perf_counter() - began

    def collect(self, inputs: list[dict]) -> Scored:
        """One scored response to each of this process's dataset rows, whose groups may go on in the next process.

        With dynamic sampling some groups are then of other dataset rows than was asked for.
        """
        first = self._accelerator.process_index * len(inputs)
        self.sync()
        self._fields = {row["example_id"]: row for row in inputs}
        if self.refit:
            self._refit(inputs, first)
        self._whole = self.last = self._roll_out(inputs, first)
        if self._options.refill_rounds:
            self.last = self._refill(self._whole, first)
        return self.last

    def _placed(self, inputs: list[dict], first: int) -> tuple[list[Row], list[int]]:
        """Rows with their places in their groups. Args: first: place of the first row among those of all processes."""
        rows = [Row(row["example_id"], tuple(self._render(row))) for row in inputs]
        return rows, [(first + i) % self._group_size for i in range(len(inputs))]

    def _roll_out(self, inputs: list[dict], first: int) -> Scored:
        """Rolls out and scores some dataset rows, and adds what that cost to the step's metrics."""
        self._fields |= {row["example_id"]: row for row in inputs}
        rows, slots = self._placed(inputs, first)
        batch = self.stage.generate(rows, step=self.version, slots=slots)
        check_batch(batch, len(inputs), self.version)
        began = time.perf_counter()
        totals, metrics = self._score(inputs, self._decode([c.tokens for c in batch.completions]))
        rewards = [
            None if total is None or c.failure else total + self._overlong(c.tokens)
            for total, c in zip(totals, batch.completions, strict=True)
        ]
        spent = {"timing_s/reward": time.perf_counter() - began}
        for name, value in (metrics | spent).items():  # what further prompts cost and fail at adds up
            adds = name in self._metrics and name in ("timing_s/reward", "reward/failed", "reward/timeouts")
            self._metrics[name] = self._metrics[name] + value if adds else self._metrics.get(name, value)
        return Scored(inputs, rows, batch, rewards)

    def _refill(self, got: Scored, first: int) -> Scored:
        """The rows of the step, those of uniform groups replaced as far as further prompts went: trainers/refill.py."""
        world, rank = self._accelerator.num_processes, self._accelerator.process_index
        asked = self._exchange([(row.example_id, reward) for row, reward in zip(got.rows, got.rewards, strict=True)])
        further: list[Scored] = []

        def roll_out(indices: list[int]) -> list[float | None]:
            rows = [index for index in indices for _ in range(self._group_size)]
            begin, end = (len(rows) * i // world for i in (rank, rank + 1))
            own = self._roll_out([self._dataset[index] for index in rows[begin:end]], begin)
            self._whole = self._whole + own
            further.extend(self._exchange([own]))
            return [reward for part in further[-world:] for reward in part.rewards]

        rewards, taken = [reward for _, reward in asked], {example_id for example_id, _ in asked}
        rounds, size = self._options.refill_rounds, self._group_size
        places, metrics = refill(rewards, size, self._further(taken), roll_out, rounds)
        known = [reward for reward in rewards if reward is not None]
        self._metrics |= metrics | {"reward": sum(known) / len(known) if known else math.nan}
        whole, order = sum(further, got), []
        for place in range(first, first + len(got.rows)):
            group, slot = divmod(place, size)
            order.append(len(got.rows) + places[group] * size + slot if group in places else place - first)
        return whole.select(order)

    def _further(self, taken: set[str]) -> Iterator[int]:
        """Dataset rows of other prompts in an order of this step's own, the same in all processes."""
        key = derive_key(self._seed, "refill", 0, self.version, "trainer")
        order = torch.randperm(len(self._dataset), generator=torch.Generator().manual_seed(key))
        return (index for index in order.tolist() if self._dataset[index]["example_id"] not in taken)

    def _refit(self, inputs: list[dict], first: int) -> None:
        """Refits the judge to what the old texts of this step's rows and the policy differ in now."""
        rows, slots = self._placed(inputs, first)
        old = [self.stage.rollout.cache.get(row.example_id, slot) for row, slot in zip(rows, slots, strict=True)]
        self._metrics |= self.refit.step(rows, [text and text.tokens for text in old])

    def finish(self) -> dict[str, float]:
        """Stores what was rolled out, runs the control rows that are due, and returns metrics over all processes."""
        whole = self._whole
        metrics = self._metrics | self.stage.finish(whole.rows, whole.batch, whole.rewards, step=self.version)
        self._metrics = {}
        if self.stage.measured:  # plain decoding takes the engine's path too, and would not tell that it is a wrong one
            weights.check(self.engine, self._policy(), self.version, self._probe)
        if self.cotraining:
            self._observe()
        return across_processes(metrics, self._accelerator)

    # Co-training of the draft model ------------------------------------------------------------------------------

    def _cotraining(self, seed: int) -> DrafterTrainer:
        """Co-training of the module that the engine drafts with."""
        if self._accelerator.num_processes > 1:
            raise RolloutError(
                f"trainer.drafter.train=true works in one process, not in {self._accelerator.num_processes}: their "
                "drafters would drift apart. Use trainer.drafter.train=false, or start one process"
            )
        drafter = getattr(self.engine, "drafter", None)
        if drafter is None:
            raise RolloutError(
                f"trainer.drafter.train=true needs a draft model in this process, which {type(self.engine).__name__} "
                "has not. Use rollout.engine=transformers and cluster.num_workers=0 with rollout.drafter=DIR"
            )
        return DrafterTrainer(drafter.model, self._policy(), self._options.drafter, self.engine.sampling, seed)

    def _observe(self) -> None:
        """Shows co-training the rows of the rollout that have a response."""
        whole = self._whole
        done = [(row.prompt, c) for row, c in zip(whole.rows, whole.batch.completions, strict=True) if not c.failure]
        texts, rejected = [(prompt, c.tokens) for prompt, c in done], [c.rejected for _, c in done]
        self.cotraining.observe(texts, rejected, self.version, whole.batch.stats)

    # Old log-probs and corrections -------------------------------------------------------------------------------

    @property
    def old_from_engine(self) -> bool:
        """True when the engine's log-probs are pi_old, False when the trainer computes its own."""
        lossy = self.stage.rollout.config.lossy
        return self._options.old_logprobs == "engine" or (self._options.old_logprobs == "auto" and lossy)

    def importance(
        self, drawn: torch.Tensor, mask: torch.Tensor, own: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """Weights [B, T] of tokens that another law or another engine drew, by `trainer.correction`; None needs none.

        Args:
            drawn: the engine's log-probs of the batch [B, T].
            mask: 1 for response tokens [B, T].
            own: gives the trainer's log-probs [B, T] when they are needed.
        """
        if self.stage.rollout.config.lossy:
            logp, behaviour = drawn, torch.zeros_like(drawn)
            for i, c in enumerate(self.last.batch.completions):
                behaviour[i, : len(c.tokens)] = torch.tensor(c.behaviour_logprobs)
        elif self._other_numerics and not self.old_from_engine and self._options.correction != "none":
            logp, behaviour = own(), drawn
        else:
            return None
        ratios = correction_weights(logp, behaviour, mask, self._options.correction, self._options.correction_cap)
        if (used := ratios[mask.bool()]).numel():
            summary = {"min": used.min(), "mean": used.mean(), "max": used.max()}
            self._metrics |= {f"sampling/importance_sampling_ratio/{k}": v.item() for k, v in summary.items()}
        return ratios

    @property
    def _other_numerics(self) -> bool:
        """True when the engine computes with another implementation or other weights than the trainer."""
        return self.stage.rollout.config.engine != "transformers" or (
            self._options.precision == "bf16" and self.engine.own_weights
        )

    # -------------------------------------------------------------------------------------------------------------

    def _decode(self, responses: Sequence[list[int]]) -> list[str]:
        return self._tokenizer.batch_decode(responses, skip_special_tokens=True)

    def _score_tokens(self, rows: Sequence[Row], responses: Sequence[list[int]]) -> list[float | None]:
        """Rewards of control rows and of mined texts; they are not logged as the step's rewards."""
        totals, _ = self._score([self._fields[row.example_id] for row in rows], self._decode(responses))
        return [None if t is None else t + self._overlong(ids) for t, ids in zip(totals, responses, strict=True)]

    def _overlong(self, ids: Sequence[int]) -> float:
        cap = self.stage.rollout.config.max_new_tokens
        return overlong_penalty(len(ids), cap, self._options.overlong_tokens(cap))


def check_batch(batch: RolloutBatch, rows: int, version: int) -> None:
    """Trainers take wrong-length log-probs and stale texts silently and crash on empty responses; all are refused."""
    if len(batch.completions) != rows:
        raise RolloutError(f"the engine returned {len(batch.completions)} responses for {rows} rows")
    for i, c in enumerate(batch.completions):
        if not c.failure and not 0 < len(c.tokens) == len(c.logprobs) == len(c.behaviour_logprobs) == len(c.reused):
            raise RolloutError(f"the engine returned a malformed response for row {i}: {len(c.tokens)} tokens, "
                               f"{len(c.logprobs)} log-probs")  # fmt: skip
        if not c.failure and c.version != version:
            raise RolloutError(f"the engine returned row {i} by weight version {c.version} at version {version}")
