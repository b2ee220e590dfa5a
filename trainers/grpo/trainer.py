"""GRPO and DAPO on the GRPOTrainer of TRL 1.16; PPO is a subclass of theirs.

`rollout_func` returns our responses to TRL. An override of `_generate_and_score_completions` receives the dataset rows,
calls super and adjusts the batch. No method body of TRL is copied.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler

from specrl.rollout.engines.base import evaluation
from specrl.rollout.reduction import Metric, highest, mean, seconds
from specrl.trainers.callbacks import StepMetrics
from specrl.trainers.checkpoint import writing
from specrl.trainers.grpo.limits import check_trl
from specrl.trainers.rollouts import Rollouts
from specrl.trainers.setup import Setup

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class EpochRepeatSampler(RepeatSampler):
    """TRL's sampler, re-seeded per epoch, so that a resumed run keeps its order (TRL's repeats that of epoch 0)."""

    def __init__(self, *args: Any, epoch: Callable[[], int], **options: Any):
        super().__init__(*args, **options)
        self._epoch = epoch  # transformers 5.19 calls `set_epoch` in single-process runs only

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed((self.seed or 0) * 1_000_003 + self._epoch())
        return super().__iter__()


class GRPOTrainerWithReuse(GRPOTrainer):
    """A GRPOTrainer whose responses come from Rollouts, which are built from `setup`."""

    args: GRPOConfig
    model: torch.nn.Module
    num_generations: int
    processing_class: PreTrainedTokenizerBase
    train_dataset: Dataset

    def __init__(
        self,
        model: PreTrainedModel,
        args: GRPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        setup: Setup,
        peft_config: PeftConfig | None = None,
    ):
        check_trl()
        self._options = setup.trainer
        self._logps: torch.Tensor | None = None
        super().__init__(
            model,
            reward_funcs=self._total_reward,
            args=args,
            train_dataset=setup.dataset,
            processing_class=tokenizer,
            peft_config=peft_config,
            rollout_func=self._rollout,
        )
        self.remove_callback(PrinterCallback)  # the run's monitor prints instead
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
            # accelerate's policy would round the log-probs and values of a pass to bf16
            plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)

        def policy() -> PreTrainedModel:
            return self.accelerator.unwrap_model(self.model)

        self.rollouts = Rollouts(setup, self.accelerator, policy, lambda: self.state, self._upcoming)
        self._step_metrics = StepMetrics()
        self.add_callback(self._step_metrics)

    def note(self, metrics: Mapping[str, Metric]) -> None:
        """Adds metrics to the log of the step."""
        self._step_metrics.note(metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs the noted metrics together with TRL's, and replaces TRL's of the same names."""
        for name, value in self._step_metrics.reduced().items():
            self._metrics["train"][name] = [value]
        super().log(logs, start_time)

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        """transformers takes a step before it asks whether a resumed run with max_steps is finished."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **options)

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochRepeatSampler:
        return self._sampler(lambda: self.rollouts.epoch)

    def _sampler(self, epoch: Callable[[], int]) -> EpochRepeatSampler:
        return EpochRepeatSampler(
            data_source=self.train_dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self._options.prompts_per_step,
            repeat_count=self._options.steps_per_rollout * self.args.gradient_accumulation_steps,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
            epoch=epoch,
        )

    def _upcoming(self) -> list[dict[str, Any]]:
        """This process's dataset rows of the next rollout, as the sampler will yield them."""
        updates = self._options.steps_per_rollout
        if self.state.global_step + updates >= self.state.max_steps:
            return []
        rollouts_per_epoch = self._options.rollouts_per_epoch(len(self.train_dataset))
        epoch, nth = divmod(self.state.global_step // updates + 1, rollouts_per_epoch)
        sampler = self._sampler(lambda: epoch)
        rows = sampler.batch_size * sampler.mini_repeat_count
        share = rows // self.accelerator.num_processes
        first = nth * rows * sampler.repeat_count + share * self.accelerator.process_index
        return [self.train_dataset[index] for index in islice(sampler, first, first + share)]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        inputs = self.rollouts.collect(inputs).inputs
        with self._no_old_pass():
            out = super()._generate_and_score_completions(inputs)
        self._adjust(out)
        for part in ("mean", "std"):  # same values as `reward` and `reward_std`
            self._metrics["train"].pop(f"rewards/{self._total_reward.__name__}/{part}", None)
        if self.scale_rewards == "batch":  # TRL takes the batch's deviation for that of each group
            still = out["advantages"].reshape(len(inputs), -1).eq(0).all(-1)
            self.note({"frac_reward_zero_std": mean(still.sum().item(), len(inputs))})
        self.note(self.rollouts.finish())
        return out

    @contextmanager
    def _no_old_pass(self) -> Iterator[None]:
        """TRL makes no pass for old log-probs: GRPO's first update has them, and PPO's critic needs the same pass."""
        updates = self.num_iterations
        parts = self.args.steps_per_generation
        self.num_iterations = 1
        self.args.steps_per_generation = self.args.gradient_accumulation_steps
        try:
            yield
        finally:
            self.num_iterations = updates
            self.args.steps_per_generation = parts

    def _rollout(self, prompts: list, trainer: GRPOTrainer) -> dict[str, list]:
        """TRL's rollout_func. Returns the batch collected before, because prompts alone do not identify an example."""
        rows = self.rollouts.train_batch.rows
        completions = self.rollouts.train_batch.batch.completions
        output: dict[str, list] = {
            "prompt_ids": [list(row.prompt) for row in rows],
            "completion_ids": [c.tokens for c in completions],
            "logprobs": [c.logprobs for c in completions],
        }
        if any(c.mask is not None for c in completions):  # TRL's `tool_mask`
            output["env_mask"] = [c.mask or [1] * len(c.tokens) for c in completions]
        return output

    def _total_reward(self, **_: Any) -> list[float | None]:
        """TRL's reward function: one total per row. TRL 1.16 excludes None from the group's baseline."""
        return self.rollouts.train_batch.rewards

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *args: Any, **kwargs: Any):
        began = time.perf_counter()
        result = super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kwargs)
        if not torch.is_grad_enabled():  # TRL's only remaining pass without gradients is the reference policy's
            self.note({"timing_s/ref_log_prob": seconds(time.perf_counter() - began)})
            return result
        self._logps = result[0].detach()
        return result

    def _compute_loss(self, model, inputs: dict[str, Any]) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        if self.num_iterations > 1 and self.rollouts.batch_is_current:
            inputs.setdefault("old_per_token_logps", self._logps)  # for the ratios of later updates
        if self.model.training and self.rollouts.batch_is_current:
            mask = loss_mask(inputs).bool()
            gap = (self._logps - inputs["sampling_per_token_logps"]).abs()[mask]
            if gap.numel():
                name = "sampling/sampling_logp_difference"
                self.note(
                    {f"{name}/mean": mean(gap.sum().item(), gap.numel()), f"{name}/max": highest(gap.max().item())}
                )
        return loss

    def _save_checkpoint(self, model, trial) -> None:
        with writing(Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"):
            super()._save_checkpoint(model, trial)

    def _adjust(self, out: dict[str, Any]) -> None:
        """Masks rows without a reward. Adds the engine's log-probs as pi_old, and importance weights, where needed."""
        scored = [reward is not None for reward in self.rollouts.train_batch.rewards]
        out["completion_mask"] *= torch.tensor(scored, device=out["completion_mask"].device)[:, None]
        logprobs = out["sampling_per_token_logps"]
        if self.rollouts.old_from_engine:
            out["old_per_token_logps"] = logprobs
        self._estimate_advantages(out)
        ratios = self.rollouts.importance(logprobs, loss_mask(out), lambda: self._trainer_logps(out))
        if ratios is not None:
            out["advantages"] = out["advantages"].reshape(len(ratios), -1) * ratios

    def _estimate_advantages(self, out: dict[str, Any]) -> None:
        """Changes the advantages of a rollout; those of GRPO are TRL's."""

    def _trainer_logps(self, out: dict[str, Any]) -> torch.Tensor:
        """The policy's log-probs [B, T] of the responses, which the update also uses as pi_old."""
        if "old_per_token_logps" not in out:
            out["old_per_token_logps"] = self._pass(out, self.model)
        return out["old_per_token_logps"]

    @torch.no_grad()
    def _pass(self, out: dict[str, Any], model: Callable[..., Any]) -> torch.Tensor:
        """The policy's log-probs [B, T] of the responses before the update. Args: model: the policy, or around it."""
        began = time.perf_counter()
        ids, mask = (torch.cat([out[f"prompt_{n}"], out[f"completion_{n}"]], dim=1) for n in ("ids", "mask"))
        keep = out["completion_ids"].shape[1]
        rows = self.args.per_device_train_batch_size
        with evaluation(self.model):
            passed = super()._get_per_token_logps_and_entropies(model, ids, mask, keep, rows)
        self.note({"timing_s/old_log_prob": seconds(time.perf_counter() - began)})
        return passed[0]


def loss_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    """1 for tokens that the policy sampled and the loss counts [B, T]; `completion_mask` includes those of tools."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
