"""GRPO and DAPO on TRL: the only file that touches trl.

Two seams (checked against TRL 1.16 at start-up): `rollout_func` hands TRL our responses, and a wrapper around
`_generate_and_score_completions` that calls super sees the dataset rows before and the batch after. No method body of
TRL is copied.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import gather_object

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
with warnings.catch_warnings():  # TRL looks for vLLM's version although it is not used here
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM")
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import RepeatSampler

from rollout.config import RolloutConfig
from rollout.engines.base import Engine
from rollout.speculative import SpeculativeRollout
from rollout.types import RolloutBatch, RolloutError, Row
from trainers import weights
from trainers.advantages import overlong_penalty
from trainers.config import TrainerConfig
from trainers.losses import correction_weights
from trainers.stage import RolloutStage

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

    from rollout.cache import TrajectoryCache

NEEDED = (
    "_generate_and_score_completions",
    "_get_train_sampler",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)


class LastRollout(NamedTuple):
    """The latest rollout batch of this process, row by row, with total rewards."""

    rows: list[Row]
    batch: RolloutBatch
    rewards: list[float | None]


class EpochRepeatSampler(RepeatSampler):
    """TRL's sampler, re-seeded per epoch: a resumed run sees the order it would have seen (TRL replays epoch 0's).

    It asks for the epoch itself, as transformers 5.19 passes `set_epoch` to samplers in single-process runs only.
    """

    def __init__(self, *args: Any, epoch: Callable[[], int], **options: Any):
        super().__init__(*args, **options)
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed((self.seed or 0) * 1_000_003 + self._epoch())
        return super().__iter__()


class GRPOTrainerWithReuse(GRPOTrainer):
    """GRPOTrainer whose responses come from SpeculativeRollout.

    Args:
        score: rewards of rows given as (dataset rows, response texts); returns the total per row, None where it failed,
            and metrics to log.
        cache: trajectories of earlier epochs; None reuses nothing.
        render: prompt of a dataset row as token ids.
        make_engine: the rollout engine, given the policy as it is trained (adapters included).
        rollout_config, trainer_config: the run's options.
        The other arguments are GRPOTrainer's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: GRPOConfig,
        train_dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        score: Callable[[Sequence[dict], Sequence[str]], tuple[list[float | None], dict[str, float]]],
        render: Callable[[dict], list[int]],
        make_engine: Callable[[torch.nn.Module], Engine],
        cache: TrajectoryCache | None,
        rollout_config: RolloutConfig,
        trainer_config: TrainerConfig,
        callbacks: Sequence[TrainerCallback] = (),
        peft_config: PeftConfig | None = None,
    ):
        check_trl()
        self._score, self._render, self._options = score, render, trainer_config
        self._inputs: list[dict] = []
        self._rows: list[Row] = []
        self._batch: RolloutBatch | None = None
        self._rewards: list[float | None] = []
        self._logps: torch.Tensor | None = None
        super().__init__(
            model,
            reward_funcs=self._total_reward,
            args=args,
            train_dataset=train_dataset,
            processing_class=tokenizer,
            callbacks=list(callbacks),
            peft_config=peft_config,
            rollout_func=self._rollout,
        )
        policy = self.accelerator.unwrap_model(self.model)
        self.engine = make_engine(policy)
        self._probe = self._render(train_dataset[0])  # any text does
        self._sent: int | None = None
        self.stage = RolloutStage(
            SpeculativeRollout(self.engine, cache, rollout_config, args.seed),
            self._score_tokens,
            strict=policy.dtype == torch.float32
            and self.accelerator.device.type == "cpu"
            and (rollout_config.top_p, rollout_config.top_k) == (1.0, 0),  # rounding can move the edge of the kept set
            exchange=gather_object if self.accelerator.num_processes > 1 else lambda entries: entries,
        )

    # TRL's hooks -------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochRepeatSampler:
        return EpochRepeatSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
            epoch=lambda: self._visit,
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._inputs = inputs
        out = super()._generate_and_score_completions(inputs)
        metrics = self.stage.finish(self._rows, self._batch, self._rewards, visit=self._visit, step=self._version)
        for name, value in self._across_processes(metrics).items():
            self._metrics["train"][name].append(value)
        return self._with_behaviour(out)

    def _rollout(self, prompts: list, trainer: GRPOTrainer) -> dict[str, list]:
        """TRL's rollout_func. Rows come from the stashed inputs, as prompts alone do not identify an example."""
        self._rows = [Row(row["example_id"], tuple(self._render(row))) for row in self._inputs]
        first = self.accelerator.process_index * len(prompts)
        slots = [(first + i) % self.num_generations for i in range(len(prompts))]
        self.sync_engine()
        self._batch = batch = self.stage.generate(self._rows, visit=self._visit, step=self._version, slots=slots)
        _check_batch(batch, len(prompts))
        stand_in = [self.processing_class.pad_token_id]  # TRL cannot take an empty response; it is masked afterwards
        return {
            "prompt_ids": [list(row.prompt) for row in self._rows],
            "completion_ids": [stand_in if c.failure else c.tokens for c in batch.completions],
            "logprobs": [[0.0] if c.failure else c.logprobs for c in batch.completions],
        }

    def _total_reward(self, completions: list, completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        """TRL's reward function: one total per row. None masks the row, as TRL 1.16 leaves it out of its group."""
        began = time.perf_counter()
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        totals, metrics = self._score(self._inputs, texts)
        self._rewards = [
            None if total is None or c.failure else total + self._overlong(ids)
            for total, ids, c in zip(totals, completion_ids, self._batch.completions, strict=True)
        ]
        for name, value in self._across_processes(metrics | {"timing_s/reward": time.perf_counter() - began}).items():
            self._metrics["train"][name].append(value)
        return self._rewards

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any):
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._logps = result[0].detach()
        return result

    def _compute_loss(self, model, inputs: dict[str, Any]) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        if self.model.training and self._batch_is_current:
            mask = inputs["completion_mask"].bool()
            gap = (self._logps - inputs["sampling_per_token_logps"]).abs()[mask]
            if gap.numel():
                self._metrics["train"]["sampling/sampling_logp_difference/mean"].append(gap.mean().item())
                self._metrics["train"]["sampling/sampling_logp_difference/max"].append(gap.max().item())
        return loss

    def sync_engine(self) -> None:
        """Brings the engine to the current weights; costs nothing when it has them."""
        if self._sent == self._version and self.engine.own_weights:
            return
        began = time.perf_counter()
        weights.send(self.engine, self.accelerator.unwrap_model(self.model), self._version, self._probe)
        self._sent = self._version
        if self.engine.own_weights:
            self._metrics["train"]["timing_s/sync"].append(time.perf_counter() - began)

    def last_rollout(self) -> LastRollout:
        """What was generated last; call it after a step."""
        return LastRollout(self._rows, self._batch, self._rewards)

    # Ours --------------------------------------------------------------------------------------------------------

    @property
    def _version(self) -> int:
        """Weight version: optimiser steps taken."""
        return self.state.global_step

    @property
    def _visit(self) -> int:
        """How often the prompts of this batch were rolled out before: whole epochs taken."""
        return int((self.state.epoch or 0.0) + 1e-6)

    @property
    def _batch_is_current(self) -> bool:
        """True while no update was made since the rollout, so that trainer and engine describe the same weights."""
        return self._batch is not None and self._batch.completions[0].version == self._version

    def _with_behaviour(self, out: dict[str, Any]) -> dict[str, Any]:
        """Old log-probs from the engine, and weights for tokens that another law or another engine drew."""
        for i, c in enumerate(self._batch.completions):
            if c.failure:
                out["completion_mask"][i] = 0
        rollout = self.stage.rollout.config
        lossy = rollout.acceptance == "lenient" or rollout.router.kind != "off"
        source, drawn = self._options.old_logprobs, out["sampling_per_token_logps"]
        from_engine = source == "engine" or (source == "auto" and lossy)
        if from_engine:
            out["old_per_token_logps"] = drawn
        if lossy:
            behaviour = torch.zeros_like(drawn)
            for i, c in enumerate(self._batch.completions):
                behaviour[i, : len(c.tokens)] = torch.tensor(c.behaviour_logprobs)
            self._weigh(out, drawn, behaviour)
        elif rollout.engine != "transformers" and not from_engine and self._options.correction != "none":
            self._weigh(out, self._trainer_logps(out), drawn)
        return out

    def _weigh(self, out: dict[str, Any], logp: torch.Tensor, behaviour: torch.Tensor) -> None:
        """Multiplies the advantages by the importance weights of `trainer.correction`."""
        mask = out["completion_mask"]
        ratios = correction_weights(logp, behaviour, mask, self._options.correction, self._options.correction_cap)
        out["advantages"] = out["advantages"][:, None] * ratios
        used = ratios[mask.bool()]
        summary = {"min": used.min(), "mean": used.mean(), "max": used.max()} if used.numel() else {}
        for name, value in summary.items():
            self._metrics["train"][f"sampling/importance_sampling_ratio/{name}"].append(value.item())

    @torch.no_grad()
    def _trainer_logps(self, out: dict[str, Any]) -> torch.Tensor:
        """The policy's own log-probs [B, T] of the responses, which the update then takes as pi_old."""
        if "old_per_token_logps" not in out:
            ids = torch.cat([out["prompt_ids"], out["completion_ids"]], dim=1)
            mask = torch.cat([out["prompt_mask"], out["completion_mask"]], dim=1)
            keep, rows = out["completion_ids"].shape[1], self.args.per_device_train_batch_size
            out["old_per_token_logps"] = super()._get_per_token_logps_and_entropies(self.model, ids, mask, keep, rows)[
                0
            ]
        return out["old_per_token_logps"]

    def _score_tokens(self, rows: Sequence[Row], responses: Sequence[list[int]]) -> list[float | None]:
        """Rewards of control rows; they are not logged as the step's rewards."""
        fields = {row["example_id"]: row for row in self._inputs}
        texts = self.processing_class.batch_decode(responses, skip_special_tokens=True)
        totals, _ = self._score([fields[row.example_id] for row in rows], texts)
        return [None if t is None else t + self._overlong(ids) for t, ids in zip(totals, responses, strict=True)]

    def _overlong(self, ids: Sequence[int]) -> float:
        return overlong_penalty(len(ids), self.max_completion_length, self._options.overlong_buffer)

    def _across_processes(self, metrics: dict[str, float]) -> dict[str, float]:
        """Counts and throughput summed over processes, seconds and maxima of the slowest, the rest averaged."""
        if self.accelerator.num_processes == 1:
            return metrics
        names = sorted(set(gather_object(list(metrics))))
        local = torch.tensor([metrics.get(name, torch.nan) for name in names], device=self.accelerator.device)
        table = self.accelerator.gather(local).view(-1, len(names)).cpu()
        return {name: reduce_metric(name, column) for name, column in zip(names, table.T, strict=True)}


SUMMED = ("_tokens", "/ties", "/control_mismatches", "/failed", "/failed_rows", "/timeouts", "/throughput")


def reduce_metric(name: str, values: torch.Tensor) -> float:
    """One number from every process's value [world]; NaN marks a process without one."""
    if name.endswith(SUMMED):
        return values.nansum().item()
    if name.startswith("timing_s/") or name.endswith("_max"):
        return values.nan_to_num(-torch.inf).max().item()
    return values.nanmean().item()


def check_trl() -> None:
    """Fails at start when TRL lost a name this adapter relies on."""
    import trl

    missing = [name for name in NEEDED if not hasattr(GRPOTrainer, name)]
    if missing:
        raise RolloutError(
            f"trl {trl.__version__} has no GRPOTrainer.{missing[0]}, which specrl relies on. Install trl==1.16.0"
        )


def _check_batch(batch: RolloutBatch, rows: int) -> None:
    """TRL takes wrong-length log-probs silently and crashes on empty responses, so both are refused here."""
    if len(batch.completions) != rows:
        raise RolloutError(f"the engine returned {len(batch.completions)} responses for {rows} rows")
    for i, c in enumerate(batch.completions):
        if not c.failure and not 0 < len(c.tokens) == len(c.logprobs) == len(c.behaviour_logprobs) == len(c.reused):
            raise RolloutError(f"the engine returned a malformed response for row {i}: {len(c.tokens)} tokens, "
                               f"{len(c.logprobs)} log-probs")  # fmt: skip


def grpo_config(
    trainer: TrainerConfig,
    rollout: RolloutConfig,
    *,
    output_dir: Path,
    seed: int,
    cpu: bool,
    world: int,
    trackers: list[str],
) -> GRPOConfig:
    """TRL's arguments for one optimiser step per rollout batch of prompts_per_step * group_size rows."""
    rows = trainer.prompts_per_step * rollout.group_size
    per_process = (trainer.rows_per_pass or rows // world) if world > 1 else (trainer.rows_per_pass or rows)
    passes = rows // (per_process * world)
    if passes * per_process * world != rows:
        raise RolloutError(
            f"{rows} rows per step cannot be split over {world} processes of {per_process} rows per pass"
        )
    dapo = trainer.algorithm == "dapo"
    return GRPOConfig(
        output_dir=str(output_dir),
        per_device_train_batch_size=per_process,
        gradient_accumulation_steps=passes,
        steps_per_generation=passes,
        num_iterations=trainer.updates_per_rollout,
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        learning_rate=trainer.learning_rate,
        lr_scheduler_type=trainer.lr_schedule,
        warmup_steps=trainer.warmup_steps,
        num_train_epochs=trainer.epochs,
        max_steps=trainer.max_steps or -1,
        epsilon=trainer.clip,
        epsilon_high=trainer.clip_high or (0.28 if dapo else trainer.clip),
        beta=trainer.beta,
        loss_type=trainer.algorithm if trainer.loss == "auto" else trainer.loss,
        scale_rewards=trainer.scale_rewards,
        mask_truncated_completions=trainer.mask_truncated,
        max_grad_norm=trainer.max_grad_norm,
        weight_decay=trainer.weight_decay,
        bf16=trainer.precision == "bf16",
        use_cpu=cpu,
        gradient_checkpointing=trainer.gradient_checkpointing,
        save_strategy="steps",
        save_steps=trainer.save_every or 10**9,  # the last step is saved in any case
        save_total_limit=None,  # SaveCache removes old checkpoints, once the new one is complete
        logging_steps=1,
        report_to=trackers or "none",
        disable_tqdm=True,
        seed=seed,
    )
