"""PPO (Schulman et al. 2017, arXiv 1707.06347) on accelerate: rollout, advantages, clipped updates, in reading order.

Rollouts, cache, rewards and metrics come from Rollouts, as under GRPO; transformers' callbacks log, save and stop.
Checkpoints hold weights, optimiser and schedule only: data order, minibatches and dropout follow from (seed, step).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor
from transformers import TrainingArguments, get_scheduler

from specrl.rollout.keys import derive_key
from specrl.rollout.reduction import highest, mean
from specrl.rollout.types import RolloutError
from specrl.trainers import snapshot
from specrl.trainers.ppo import objectives
from specrl.trainers.ppo.critic import build_models
from specrl.trainers.ppo.experience import Experience, Responses, ValueTargets, response_metrics
from specrl.trainers.ppo.loop import Loop
from specrl.trainers.ppo.prior import Prior
from specrl.trainers.rollouts import Rollouts, Setup

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Ways to run in which every process has all weights."""
SMOOTHING = 0.9  # of the explained variance, whose parts are small and noisy if a rollout's rewards are nearly equal


class PPOTrainer(Loop):
    """PPO whose responses come from Rollouts.

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
        self._options = options
        self._group_size = setup.rollout.group_size
        self._dataset = setup.dataset
        self._tokenizer = tokenizer
        accelerator = Accelerator(cpu=args.use_cpu, mixed_precision="bf16" if args.bf16 else "no")
        if accelerator.distributed_type not in REPLICATED:
            raise RolloutError(
                f"PPO needs all weights in every process and cannot run with {accelerator.distributed_type.value}. "
                "Launch it with torchrun or with accelerate's MULTI_GPU, or take trainer.algorithm=grpo"
            )
        self._rows_per_pass = args.per_device_train_batch_size
        self._models = build_models(model, options, setup.rollout.temperature, peft_config)
        self.policy = self._models.trained.policy
        self.model = accelerator.prepare_model(self._models.trained)
        self.optimizer = torch.optim.AdamW(self._models.parameter_groups(options), weight_decay=options.weight_decay)
        self.scheduler = get_scheduler(
            options.lr_schedule, self.optimizer, options.warmup_steps, num_training_steps=args.max_steps
        )
        self._explained = [0.0, 0.0]  # smoothed variances of the critic's errors, and of returns
        self._beta = options.beta
        self._prior = Prior(accelerator)
        parts = {"model": self.policy, "optimizer": self.optimizer, "lr_scheduler": self.scheduler}
        steps_per_epoch = options.steps_per_epoch(len(setup.dataset))
        super().__init__(args, accelerator, steps_per_epoch, processing_class=tokenizer, **parts)
        self.rollouts = Rollouts(setup, accelerator, lambda: self.policy, lambda: self.state, self._next_inputs)

    def take_step(self) -> dict[str, float]:
        """One optimiser step; every `steps_per_rollout`-th begins with a rollout."""
        step = self.state.global_step
        logs: dict[str, float] = {}
        torch.manual_seed(derive_key(self.args.seed, "dropout", self.accelerator.process_index, step, "trainer"))
        update = step % self._options.steps_per_rollout
        if update == 0:
            self._experience, logs = self._collect()
        # Every minibatch has rows of all prompts, and the same rows on any number of processes.
        minibatch = self._experience.select(slice(update % self._options.minibatches, None, self._options.minibatches))
        return {**self._update(minibatch), **logs, "num_tokens": self.state.num_input_tokens_seen}

    # Rollout -> experience ---------------------------------------------------------------------------------------

    def _inputs(self, step: int) -> list[dict]:
        """This process's dataset rows of the rollout at a step: prompts `group_size` times each, shuffled by epoch."""
        epoch, step = divmod(step, self.steps_per_epoch)
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
        """Rolls out, scores with policy, critic and reference, and turns rewards into advantages.

        Truncated rows that `mask_truncated` leaves out of the loss keep their rewards in every baseline.
        """
        sampled = self.rollouts.collect(self._inputs(self.state.global_step))
        device = self.accelerator.device
        prompts = [row.example_id for row in sampled.rows]
        known = [reward is not None for reward in sampled.rewards]
        totals = torch.tensor([torch.nan if r is None else r for r in sampled.rewards], device=device)
        pad_id = self._tokenizer.pad_token_id
        responses = Responses.of(sampled.rows, sampled.batch.completions, known, pad_id, device)
        batch = self._scored(responses, prompts)
        left_out = [self._options.mask_truncated and c.finish == "length" for c in sampled.batch.completions]
        train_mask = batch.mask * (1 - torch.tensor(left_out, device=device)[:, None].float())
        ratios = self.rollouts.importance(batch.rollout_logprobs, train_mask, lambda: batch.policy_logprobs)
        batch = self._with_advantages(batch, totals, prompts)
        advantages = batch.advantages if ratios is None else batch.advantages * ratios
        batch = replace(batch, advantages=advantages, mask=train_mask)
        self.state.num_input_tokens_seen += int(self._all_reduce(batch.attention.sum()))
        gap = (batch.policy_logprobs - batch.rollout_logprobs).abs() * batch.mask
        gaps = {
            "sampling/sampling_logp_difference/mean": mean(gap.sum().item(), batch.mask.sum().item()),
            "sampling/sampling_logp_difference/max": highest(gap.max().item()),
        }
        self.note(self.rollouts.finish() | gaps)
        logs = response_metrics(sampled.batch.completions, totals, self._group_size, self.accelerator.gather)
        return batch, logs | self._value_metrics(batch) | self._adapt_beta(batch)

    @torch.no_grad()
    def _scored(self, responses: Responses, prompts: Sequence[str]) -> Experience:
        """Adds the log-probs of policy and reference, and the values. The advantages are still 0."""
        model, reference, reference_context = self._models
        model.eval()
        passes = [(part.ids, part.attention, responses.length) for part in responses.split(self._rows_per_pass)]
        outputs = [model(*inputs) for inputs in passes]
        logp = torch.cat([out.logp for out in outputs])
        old = responses.rollout_logprobs if self.rollouts.old_from_engine else logp
        zeros = torch.zeros_like(logp)
        batch = Experience(**vars(responses), policy_logprobs=logp, old_logprobs=old, advantages=zeros)
        if model.value is not None:
            prior = self._prior.values(prompts, logp, batch.mask)
            values = torch.cat([out.values for out in outputs]) + prior
            batch.critic = ValueTargets(values, prior, returns=zeros)
        if reference is not None:
            with reference_context(), self.accelerator.autocast():
                batch.reference_logprobs = torch.cat([reference(*inputs).logp for inputs in passes])
        return batch

    def _with_advantages(self, batch: Experience, totals: Tensor, prompts: Sequence[str]) -> Experience:
        """The batch with advantages and, for a critic, returns [B, T] from total rewards [B]."""
        options = self._options
        mask = batch.mask
        kl = torch.zeros_like(mask)
        if batch.reference_logprobs is not None and options.kl_penalty == "reward":
            kl = batch.old_logprobs - batch.reference_logprobs
        rewards = objectives.token_rewards(totals, kl, mask, self._beta)
        critic = batch.critic
        if critic is not None:
            gamma, lam = options.gamma, options.gae_lambda
            advantages, returns = objectives.gae(rewards, critic.values, mask, gamma=gamma, lam=lam)
            advantages = objectives.whiten(advantages, mask, self._all_reduce)
            critic = critic._replace(returns=returns)
            monte_carlo, _ = objectives.gae(rewards, torch.zeros_like(mask), mask, gamma=gamma, lam=1.0)
            self._prior.learn(prompts, batch.policy_logprobs, monte_carlo, mask)
        elif options.advantage == "rloo":
            advantages = self._rloo_advantages(batch, rewards)
        else:
            advantages = objectives.reinforce_plus_plus(rewards, mask, options.gamma, self._all_reduce)
        return replace(batch, advantages=advantages, critic=critic)

    def _rloo_advantages(self, batch: Experience, rewards: Tensor) -> Tensor:
        sums = rewards.sum(-1).masked_fill(batch.mask.sum(-1) == 0, torch.nan)
        first = self.accelerator.process_index * len(sums)
        # All processes' rows are gathered, as a group may continue in the next process.
        advantages = objectives.rloo(self.accelerator.gather(sums), self._group_size)[first : first + len(sums)]
        return advantages[:, None] * batch.mask

    # Experience -> update ----------------------------------------------------------------------------------------

    def _update(self, minibatch: Experience) -> dict[str, float]:
        """One optimiser step on a minibatch, in which every token of all processes has the same weight."""
        self.model.train()
        tokens = self._all_reduce(minibatch.mask.sum()).clamp(min=1)
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=tokens.device))
        parts = list(minibatch.split(self._rows_per_pass))
        for i, part in enumerate(parts):
            with nullcontext() if i == len(parts) - 1 else self.accelerator.no_sync(self.model):
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
        means = self._all_reduce(torch.stack(list(sums.values()))) / tokens
        metrics = dict(zip(sums, means.tolist(), strict=True))
        metrics |= {"grad_norm": norms[0], "learning_rate": learning_rate}
        if minibatch.critic is not None:
            metrics["value/grad_norm"] = norms[1]
        return metrics

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
            values = outputs.values + part.critic.prior
            error = objectives.value_loss(values, part.critic.values, part.critic.returns, options.critic.clip)
            metrics["value_loss"] = error
            loss = loss + options.critic.loss_weight * error
        if part.reference_logprobs is not None:
            kl = objectives.kl_estimate(outputs.logp, part.old_logprobs, part.reference_logprobs)
            metrics["kl"] = kl
            if options.kl_penalty == "loss":
                loss = loss + self._beta * kl
        too_low, too_high = objectives.clipped(outputs.logp, part.old_logprobs, part.advantages, low=low, high=high)
        metrics |= {"loss": loss, "clip_ratio/low_mean": too_low, "clip_ratio/high_mean": too_high}
        metrics["clip_ratio/region_mean"] = too_low + too_high
        for name, per_token in metrics.items():
            sums[name] += (per_token.detach() * part.mask).sum()
        loss = (loss * part.mask).sum() / tokens
        self.accelerator.backward(loss * self.accelerator.num_processes)  # gradients are averaged over processes
        return loss.detach()

    def _value_metrics(self, batch: Experience) -> dict[str, float]:
        if batch.critic is None:
            return {}
        values, _, returns = batch.critic
        error = returns - values
        variance = self._mean((returns - self._mean(returns, batch.mask)).square(), batch.mask)
        unexplained = self._mean((error - self._mean(error, batch.mask)).square(), batch.mask)
        self._explained[0] = unexplained = SMOOTHING * self._explained[0] + unexplained
        self._explained[1] = variance = SMOOTHING * self._explained[1] + variance
        explained = 1 - unexplained / variance if variance > 1e-6 else torch.nan  # 1e-6: all returns are equal
        return {"value/mean": self._mean(values, batch.mask), "value/explained_variance": explained}

    def _adapt_beta(self, batch: Experience) -> dict[str, float]:
        """Moves the KL weight towards its target, for the next rollout."""
        if not self._options.kl_target or batch.reference_logprobs is None:
            return {}
        beta = self._beta
        kl = objectives.kl_estimate(batch.old_logprobs, batch.old_logprobs, batch.reference_logprobs)
        self._beta = objectives.adapted_beta(beta, self._mean(kl, batch.mask), self._options.kl_target)
        return {"kl_beta": beta}

    def _mean(self, values: Tensor, mask: Tensor) -> float:
        """Over the masked tokens of all processes."""
        total, count = self._all_reduce(torch.stack([(values * mask).sum(), mask.sum()]).double()).tolist()
        return total / max(count, 1)

    def _all_reduce(self, values: Tensor) -> Tensor:
        """Sum over processes."""
        return self.accelerator.reduce(values, "sum")

    # Saving ------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str) -> None:
        """Writes the policy; every process must call it."""
        if self.accelerator.is_main_process:
            self.policy.save_pretrained(output_dir)

    def save(self, folder: Path, progress: dict[str, Any]) -> None:
        """See Loop."""
        progress |= {"beta": self._beta, "schedule": self.scheduler.state_dict()}
        progress |= {"prior": self._prior.state(), "explained": self._explained}
        snapshot.save(folder, self._models.trained.trainable(), self.optimizer, progress)

    def load(self, folder: Path) -> dict[str, Any]:
        """See Loop."""
        progress = snapshot.load(folder, self._models.trained.trainable(), self.optimizer)
        self._beta = progress["beta"]
        self._explained = progress["explained"]
        self._prior.restore(progress["prior"])
        self.scheduler.load_state_dict(progress["schedule"])
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        return progress
