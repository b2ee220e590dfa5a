"""PPO (Schulman et al. 2017, arXiv 1707.06347) on accelerate: rollout, experience, clipped updates, in reading order.

Rollouts, cache, rewards and metrics come from Rollouts, as under GRPO; transformers' callbacks log, save and stop.
Checkpoints hold weights, optimiser and schedule only: data order, minibatches and dropout follow from (seed, step).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from specrl.rollout.keys import derive_key
from specrl.rollout.reduction import Metric, highest, mean
from specrl.rollout.types import RolloutError
from specrl.trainers import snapshot
from specrl.trainers.callbacks import StepMetrics
from specrl.trainers.checkpoint import writing
from specrl.trainers.ppo import objectives
from specrl.trainers.ppo.critic import build_models, shard
from specrl.trainers.ppo.experience import Experience, ExperienceMaker
from specrl.trainers.rollouts import Rollouts
from specrl.trainers.setup import Setup

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Ways to run in which every process has all weights."""
PROGRESS = ("global_step", "epoch", "num_input_tokens_seen")
"""The fields of transformers' TrainerState that checkpoints hold."""


class PPOTrainer:
    """PPO whose responses come from Rollouts. It calls transformers' callbacks as transformers' Trainer does.

    Args: as GRPOTrainerWithReuse; `args` are those of trainers.arguments.ppo_arguments.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        tokenizer: PreTrainedTokenizerBase,
        setup: Setup,
        peft_config: PeftConfig | None = None,
    ):
        options = setup.trainer
        self.args = args
        self._options = options
        self._group_size = setup.rollout.group_size
        self._dataset = setup.dataset
        self._steps_per_epoch = options.steps_per_epoch(len(setup.dataset))
        self._rows_per_pass = args.per_device_train_batch_size
        self.accelerator = Accelerator(cpu=args.use_cpu, mixed_precision="bf16" if args.bf16 else "no")
        _check_distributed(self.accelerator)
        self._models = build_models(model, options, setup.rollout.temperature, peft_config)
        self.policy = self._models.trained.policy
        self._sharded = shard(self._models, self.accelerator) if self.accelerator.is_fsdp2 else []
        self.model: Any = self._models.trained
        if not self._sharded:
            self.model = self.accelerator.prepare_model(self._models.trained)
        self._weights = self._models.trained.trainable()
        """What checkpoints hold. During a pass of a sharded module other parameters stand in for these."""
        self.optimizer = torch.optim.AdamW(self._models.parameter_groups(options), weight_decay=options.weight_decay)
        self.scheduler = get_scheduler(
            options.lr_schedule, self.optimizer, options.warmup_steps, num_training_steps=args.max_steps
        )
        self._maker = ExperienceMaker(
            self._models,
            setup,
            self.accelerator,
            rows_per_pass=self._rows_per_pass,
            pad_id=tokenizer.pad_token_id,
        )
        self.control = TrainerControl()
        self.state = _initial_state(args, self.accelerator)
        self._step_metrics = StepMetrics()
        self._callbacks = CallbackHandler(
            [DefaultFlowCallback, *get_reporting_integration_callbacks(args.report_to), self._step_metrics],
            model=self.policy,
            processing_class=tokenizer,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
        )
        self.rollouts = Rollouts(setup, self.accelerator, lambda: self.policy, lambda: self.state, self._next_inputs)

    def add_callback(self, callback: TrainerCallback) -> None:
        self._callbacks.add_callback(callback)

    def note(self, metrics: Mapping[str, Metric]) -> None:
        """Adds metrics to the log of the step; they are reduced over processes."""
        self._step_metrics.note(metrics)

    # Steps -------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        """Takes the remaining steps."""
        if resume_from_checkpoint:
            self._load(Path(resume_from_checkpoint))
        self._event("on_train_begin")
        while self.state.global_step < self.args.max_steps and not self.control.should_training_stop:
            self._step()
        self._event("on_train_end")

    def _step(self) -> None:
        """One optimiser step; every `steps_per_rollout`-th begins with a rollout."""
        self._event("on_step_begin")
        step = self.state.global_step
        logs: dict[str, float] = {}
        torch.manual_seed(derive_key(self.args.seed, "dropout", self.accelerator.process_index, step, "trainer"))
        update = step % self._options.steps_per_rollout
        if update == 0:
            self._experience, logs = self._collect()
        # Every minibatch has rows of all prompts, and the same rows on any number of processes.
        minibatch = self._experience.select(slice(update % self._options.minibatches, None, self._options.minibatches))
        logs = {**self._update(minibatch), **logs, "num_tokens": self.state.num_input_tokens_seen}
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / self._steps_per_epoch
        self._event("on_step_end")
        logs = logs | self._step_metrics.reduced() | {"epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._event("on_log", logs=logs)
        if self.control.should_save:
            self._save(Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}")
            self._event("on_save")

    def _event(self, name: str, **details: Any) -> None:
        self.control = getattr(self._callbacks, name)(self.args, self.state, self.control, **details)

    # Rollout -> experience ---------------------------------------------------------------------------------------

    def _inputs(self, step: int) -> list[dict]:
        """This process's dataset rows of the rollout at a step: prompts `group_size` times each, shuffled by epoch."""
        epoch, step = divmod(step, self._steps_per_epoch)
        order = torch.Generator().manual_seed(self.args.seed * 1_000_003 + epoch)
        first = step // self._options.steps_per_rollout * self._options.prompts_per_step
        prompts = torch.randperm(len(self._dataset), generator=order)[first : first + self._options.prompts_per_step]
        rows = [index for index in prompts.tolist() for _ in range(self._group_size)]
        share = len(rows) // self.accelerator.num_processes
        start = self.accelerator.process_index * share
        return [self._dataset[index] for index in rows[start : start + share]]

    def _next_inputs(self) -> list[dict]:
        """The same of the following rollout; empty at the last one."""
        step = self.state.global_step + self._options.steps_per_rollout
        return self._inputs(step) if step < self.args.max_steps else []

    def _collect(self) -> tuple[Experience, dict[str, float]]:
        """Rolls out, and turns the rollout into experience."""
        sampled = self.rollouts.collect(self._inputs(self.state.global_step))
        batch, metrics = self._maker.make(sampled, self.rollouts)
        self.state.num_input_tokens_seen += int(self.accelerator.reduce(batch.attention.sum(), "sum"))
        gap = (batch.policy_logprobs - batch.rollout_logprobs).abs() * batch.mask
        gaps = {
            "sampling/sampling_logp_difference/mean": mean(gap.sum().item(), batch.mask.sum().item()),
            "sampling/sampling_logp_difference/max": highest(gap.max().item()),
        }
        self.note(self.rollouts.finish() | gaps)
        return batch, metrics

    # Experience -> update ----------------------------------------------------------------------------------------

    def _update(self, minibatch: Experience) -> dict[str, float]:
        """One optimiser step on a minibatch, in which every token of all processes has the same weight."""
        self.model.train()
        tokens = self.accelerator.reduce(minibatch.mask.sum(), "sum").clamp(min=1)
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=tokens.device))
        parts = list(minibatch.split(self._rows_per_pass))
        for i, part in enumerate(parts):
            with nullcontext() if i == len(parts) - 1 else self._no_sync():
                self.training_step(part, tokens, sums)
        # Policy and critic are clipped separately, so that the critic's errors do not shrink the policy's step.
        norms = [
            self.accelerator.clip_grad_norm_(group["params"], self.args.max_grad_norm or torch.inf).item()
            for group in self.optimizer.param_groups
        ]
        learning_rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        means = self.accelerator.reduce(torch.stack(list(sums.values())), "sum") / tokens
        metrics = dict(zip(sums, means.tolist(), strict=True))
        metrics |= {"grad_norm": norms[0], "learning_rate": learning_rate}
        if minibatch.critic is not None:
            metrics["value/grad_norm"] = norms[1]
        return metrics

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        """Gradients are only added up in each process."""
        if not self._sharded:
            with self.accelerator.no_sync(self.model):
                yield
            return
        for root in self._sharded:
            root.set_requires_gradient_sync(False)
        yield
        for root in self._sharded:
            root.set_requires_gradient_sync(True)

    def training_step(self, part: Experience, tokens: Tensor, sums: dict[str, Tensor]) -> Tensor:
        """Forward and backward of the rows of one pass; returns their part of the minibatch's loss.

        Args:
            tokens: how many the minibatch has, over all processes.
            sums: metrics are added to it, summed over tokens.
        """
        options = self._options
        low, high = options.clip_range
        outputs = self.model(part.ids, part.attention, part.length)
        surrogate = objectives.policy_loss(outputs.logp, part.old_logprobs, part.advantages, low=low, high=high)
        metrics = {"policy_loss": surrogate, "entropy": outputs.entropy}
        loss = surrogate - options.entropy_bonus * outputs.entropy
        if part.critic is not None:
            error = objectives.value_loss(outputs.values, part.critic.values, part.critic.returns, options.critic.clip)
            metrics["value_loss"] = error
            loss = loss + options.critic.loss_weight * error
        if part.reference_logprobs is not None:
            kl = objectives.kl_estimate(outputs.logp, part.old_logprobs, part.reference_logprobs)
            metrics["kl"] = kl
            if options.kl_penalty == "loss":
                loss = loss + self._maker.beta * kl
        too_low, too_high = objectives.clipped(outputs.logp, part.old_logprobs, part.advantages, low=low, high=high)
        metrics |= {"loss": loss, "clip_ratio/low_mean": too_low, "clip_ratio/high_mean": too_high}
        metrics["clip_ratio/region_mean"] = too_low + too_high
        for name, per_token in metrics.items():
            sums[name] += (per_token.detach() * part.mask).sum()
        loss = (loss * part.mask).sum() / tokens
        self.accelerator.backward(loss * self.accelerator.num_processes)  # gradients are averaged over processes
        return loss.detach()

    # Saving ------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str) -> None:
        """Writes the policy; every process must call it."""
        weights = self.accelerator.get_state_dict(self.policy)
        if self.accelerator.is_main_process:
            self.policy.save_pretrained(output_dir, state_dict=weights)

    def _save(self, folder: Path) -> None:
        """Writes a checkpoint; every process must call it."""
        progress = {name: getattr(self.state, name) for name in PROGRESS} | self._maker.state()
        progress["schedule"] = self.scheduler.state_dict()
        with writing(folder):
            snapshot.save(folder, self._weights, self.optimizer, progress, writes=self.accelerator.is_main_process)

    def _load(self, folder: Path) -> None:
        progress = snapshot.load(folder, self._weights, self.optimizer)
        for name in PROGRESS:
            setattr(self.state, name, progress[name])
        self._maker.restore(progress)
        self.scheduler.load_state_dict(progress["schedule"])
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate


def _initial_state(args: TrainingArguments, accelerator: Accelerator) -> TrainerState:
    """The state that transformers' callbacks read, before the first step."""
    return TrainerState(
        max_steps=args.max_steps,
        logging_steps=int(args.logging_steps),
        save_steps=int(args.save_steps),
        num_train_epochs=int(args.num_train_epochs),
        is_world_process_zero=accelerator.is_main_process,
        is_local_process_zero=accelerator.is_local_main_process,
    )


def _check_distributed(accelerator: Accelerator) -> None:
    """Raises RolloutError where the processes share the policy in a way that PPO does not support."""
    kind = accelerator.distributed_type
    if kind not in REPLICATED and not accelerator.is_fsdp2:
        name = "FSDP 1" if kind == DistributedType.FSDP else kind.value
        raise RolloutError(
            f"PPO does not support {name}. Launch it with torchrun or with fsdp_version: 2, or take "
            "trainer.algorithm=grpo"
        )
