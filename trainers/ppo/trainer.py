"""PPO (Schulman et al. 2017, arXiv 1707.06347) on accelerate: rollout, advantages, clipped updates, in reading order.

Rollouts, cache, rewards and metrics are those of Rollouts, as under GRPO; transformers' callbacks record, save and
stop. Nothing but weights, optimiser and schedule is remembered: data order, minibatches and dropout follow from
(seed, step).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainingArguments, get_scheduler

from specrl.rollout.keys import derive_key
from specrl.rollout.reduction import highest, mean
from specrl.rollout.types import RolloutError
from specrl.trainers.ppo import critic, snapshot
from specrl.trainers.ppo.advantages import gae, reinforce_plus_plus, rloo, token_rewards, whiten
from specrl.trainers.ppo.experience import Experience
from specrl.trainers.ppo.loop import Loop
from specrl.trainers.ppo.losses import adapted_beta, clipped, kl_estimate, policy_loss, value_loss
from specrl.trainers.ppo.metrics import response_metrics
from specrl.trainers.ppo.prior import Prior
from specrl.trainers.rollouts import Rollouts, Setup
from specrl.trainers.scored import Scored

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
SMOOTHING = 0.9  # of the explained variance, whose parts are small and noisy where a rollout's rewards are nearly alike


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
        self._options, self._group_size = setup.trainer, setup.rollout.group_size
        self._dataset, self._tokenizer = setup.dataset, tokenizer
        accelerator = Accelerator(cpu=args.use_cpu, mixed_precision="bf16" if args.bf16 else "no")
        if accelerator.distributed_type not in PLAIN:
            raise RolloutError(
                f"PPO trains with whole weights in every process, not with {accelerator.distributed_type.value}. "
                "Launch it with torchrun or with accelerate's MULTI_GPU, or take trainer.algorithm=grpo"
            )
        self._per_pass = args.per_device_train_batch_size
        self._models = critic.models(model, setup.trainer, setup.rollout.temperature, peft_config)
        self.policy, self.model = self._models.trained.policy, accelerator.prepare_model(self._models.trained)
        self.optimizer = torch.optim.AdamW(self._models.groups(setup.trainer), weight_decay=setup.trainer.weight_decay)
        self.scheduler = get_scheduler(
            setup.trainer.lr_schedule, self.optimizer, setup.trainer.warmup_steps, num_training_steps=args.max_steps
        )
        self._explained = [0.0, 0.0]  # variance of the critic's errors, and of returns
        self._beta, self._prior = setup.trainer.beta, Prior()
        parts = {"model": self.policy, "optimizer": self.optimizer, "lr_scheduler": self.scheduler}
        steps_per_epoch = len(setup.dataset) // setup.trainer.prompts_per_step * setup.trainer.steps_per_rollout
        super().__init__(args, accelerator, steps_per_epoch, processing_class=tokenizer, **parts)
        self.rollouts = Rollouts(setup, accelerator, lambda: self.policy, lambda: self.state, self._upcoming)

    def take_step(self) -> dict[str, float]:
        """One optimiser step; every `steps_per_rollout`-th begins with a rollout."""
        step, logs = self.state.global_step, {}
        torch.manual_seed(derive_key(self.args.seed, "dropout", self.accelerator.process_index, step, "trainer"))
        if (update := step % self._options.steps_per_rollout) == 0:
            self._experience, logs = self._collect()
        # every minibatch has rows of all prompts, and the same ones on any number of processes
        part = self._experience.select(slice(update % self._options.minibatches, None, self._options.minibatches))
        return {**self._update(part), **logs, "num_tokens": self.state.num_input_tokens_seen}

    # Rollout -> experience ---------------------------------------------------------------------------------------

    def _inputs(self, step: int) -> list[dict]:
        """This process's dataset rows of the rollout at a step: prompts `group_size` times each, shuffled by epoch."""
        epoch, step = divmod(step, self.steps_per_epoch)
        order = torch.Generator().manual_seed(self.args.seed * 1_000_003 + epoch)
        first = step // self._options.steps_per_rollout * self._options.prompts_per_step
        prompts = torch.randperm(len(self._dataset), generator=order)[first : first + self._options.prompts_per_step]
        rows = [index for index in prompts.tolist() for _ in range(self._group_size)]
        share = len(rows) // self.accelerator.num_processes
        own = rows[self.accelerator.process_index * share :][:share]
        return [self._dataset[index] for index in own]

    def _upcoming(self) -> list[dict]:
        """The same of the rollout after the present one."""
        following = self.state.global_step + self._options.steps_per_rollout
        return self._inputs(following) if following < self.args.max_steps else []

    def _collect(self) -> tuple[Experience, dict[str, float]]:
        """Rolls out, scores with policy, critic and reference, and turns rewards into advantages."""
        got = self.rollouts.collect(self._inputs(self.state.global_step))
        device, prompts = self.accelerator.device, [row.example_id for row in got.rows]
        totals = torch.tensor([torch.nan if r is None else r for r in got.rewards], device=device)
        known = [reward is not None for reward in got.rewards]
        drawn = Experience.of(got.rows, got.batch.completions, known, self._tokenizer.pad_token_id, device)
        scored = self._scored(drawn, prompts)
        trained = drawn.mask * self._trained(got, device)
        ratios = self.rollouts.importance(drawn.drawn, trained, own=lambda: scored.own)
        scored = replace(scored, old=scored.drawn if self.rollouts.old_from_engine else scored.own)
        advantages, returns = self._advantages(scored, totals, prompts)
        weighted = advantages if ratios is None else advantages * ratios
        whole = replace(scored, advantages=weighted, returns=returns, mask=trained)
        self.state.num_input_tokens_seen += int(self._total(whole.attention.sum()))
        gap, name = (whole.own - whole.drawn).abs() * whole.mask, "sampling/sampling_logp_difference"
        gaps = mean(gap.sum().item(), whole.mask.sum().item()), highest(gap.max().item())
        self.note(self.rollouts.finish() | dict(zip((f"{name}/mean", f"{name}/max"), gaps, strict=True)))
        return whole, self._batch_metrics(got, totals) | self._value_metrics(whole) | self._adapt(whole)

    def _trained(self, got: Scored, device: torch.device) -> Tensor:
        """1 for rows that may be in the loss [B, 1]: truncated ones only where they are not masked. These too have
        their reward in every baseline."""
        out = [self._options.mask_truncated and c.finish == "length" for c in got.batch.completions]
        return 1 - torch.tensor(out, device=device)[:, None].float()

    @torch.no_grad()
    def _scored(self, found: Experience, prompts: Sequence[str]) -> Experience:
        """With the policy's and the reference's log-probs and the values, of responses to these prompts."""
        model, reference, initial = self._models
        model.eval()
        pieces = [(piece.ids, piece.attention, found.length) for piece in found.split(self._per_pass)]
        outputs = [model(*piece) for piece in pieces]
        fields = {"own": (own := torch.cat([out.logp for out in outputs]))}
        if model.value is not None:
            facts = self._prior.facts(prompts, own, found.mask)
            prior = self._prior.values(facts)
            fields |= {"facts": facts, "prior": prior, "values": torch.cat([out.values for out in outputs]) + prior}
        if reference is not None:
            with initial(), self.accelerator.autocast():
                fields["reference"] = torch.cat([reference(*piece).logp for piece in pieces])
        return replace(found, **fields)

    def _advantages(self, found: Experience, totals: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Advantages and, with a critic, returns [B, T] from total rewards [B] of responses to these prompts."""
        penalised = found.reference is not None and self._options.kl_penalty == "reward"
        kl = found.old - found.reference if penalised else torch.zeros_like(found.mask)
        rewards = token_rewards(totals, kl, found.mask, self._beta)
        return self.ADVANTAGES[self._options.advantage](self, found, rewards, prompts)

    def _by_critic(self, found: Experience, rewards: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        options, mask = self._options, found.mask
        advantages, returns = gae(rewards, found.values, mask, options.gamma, options.gae_lambda)
        whole, _ = gae(rewards, torch.zeros_like(mask), mask, options.gamma, 1.0)
        begun = [(prompt, w) for prompt, w, m in zip(prompts, whole[:, 0].tolist(), mask[:, 0], strict=True) if m]
        self._prior.learn(found.facts, whole, mask, self._total)
        self._prior.prompts.learn(gather_object(begun) if self.accelerator.num_processes > 1 else begun)
        return whiten(advantages, mask, self._total), returns

    def _by_group(self, found: Experience, rewards: Tensor, _: Sequence[str]) -> tuple[Tensor, None]:
        sums = rewards.sum(-1).masked_fill(found.mask.sum(-1) == 0, torch.nan)
        first = self.accelerator.process_index * len(sums)  # a group may go on in the next process
        own = rloo(self.accelerator.gather(sums), self._group_size)[first : first + len(sums)]
        return own[:, None] * found.mask, None

    def _by_batch(self, found: Experience, rewards: Tensor, _: Sequence[str]) -> tuple[Tensor, None]:
        return reinforce_plus_plus(rewards, found.mask, self._options.gamma, self._total), None

    ADVANTAGES = {"gae": _by_critic, "rloo": _by_group, "reinforce_plus_plus": _by_batch}  # noqa: RUF012

    # Experience -> update ----------------------------------------------------------------------------------------

    def _update(self, part: Experience) -> dict[str, float]:
        """One optimiser step on a minibatch, in which every token of all processes weighs the same."""
        self.model.train()
        tokens, sums = self._total(part.mask.sum()).clamp(min=1), Counter()
        pieces = list(part.split(self._per_pass))
        for i, piece in enumerate(pieces):
            with nullcontext() if i == len(pieces) - 1 else self.accelerator.no_sync(self.model):
                self.training_step(piece, tokens, sums)
        norms = [  # policy and critic apart, so that the critic's errors do not shrink the policy's step
            self.accelerator.clip_grad_norm_(group["params"], self.args.max_grad_norm or torch.inf).item()
            for group in self.optimizer.param_groups
        ]
        rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        means = self._total(torch.stack(list(sums.values()))) / tokens
        metrics = dict(zip(sums, means.tolist(), strict=True)) | {"grad_norm": norms[0], "learning_rate": rate}
        return metrics | ({"value/grad_norm": norms[1]} if part.values is not None else {})

    def training_step(self, piece: Experience, tokens: Tensor, sums: Counter) -> Tensor:
        """Forward and backward of the rows of one pass; returns their part of the minibatch's loss.

        Args:
            tokens: how many the minibatch has, over all processes.
            sums: collects metrics, summed over tokens.
        """
        options, mask = self._options, piece.mask
        outputs = self.model(piece.ids, piece.attention, piece.length)
        ratio = (outputs.logp, piece.old, piece.advantages, *options.clip_range)
        found = {"policy_loss": policy_loss(*ratio), "entropy": outputs.entropy}
        loss = found["policy_loss"] - options.entropy_bonus * outputs.entropy
        if piece.values is not None:
            values = outputs.values + piece.prior
            found["value_loss"] = value_loss(values, piece.values, piece.returns, options.critic.clip)
            loss = loss + options.critic.loss_weight * found["value_loss"]
        if piece.reference is not None:
            found["kl"] = kl_estimate(outputs.logp, piece.old, piece.reference)
            if options.kl_penalty == "loss":
                loss = loss + self._beta * found["kl"]
        low, high = clipped(*ratio)
        found |= {"loss": loss, "clip_ratio/low_mean": low, "clip_ratio/high_mean": high}
        found["clip_ratio/region_mean"] = low + high
        for name, values in found.items():
            sums[name] += (values.detach() * mask).sum()
        loss = (loss * mask).sum() / tokens
        self.accelerator.backward(loss * self.accelerator.num_processes)  # gradients are averaged over processes
        return loss.detach()

    # Metrics -----------------------------------------------------------------------------------------------------

    def _batch_metrics(self, got: Scored, totals: Tensor) -> dict[str, float]:
        done, device = got.batch.completions, totals.device
        lengths = torch.tensor([len(c.tokens) for c in done], device=device)
        ended = torch.tensor([c.finish == "stop" and not c.failure for c in done], device=device)
        return response_metrics(*map(self.accelerator.gather, (lengths, ended, totals)), self._group_size)

    def _value_metrics(self, found: Experience) -> dict[str, float]:
        if found.values is None:
            return {}
        error, mask = found.returns - found.values, found.mask
        spread = self._mean((found.returns - self._mean(found.returns, mask)).square(), mask)
        missed = self._mean((error - self._mean(error, mask)).square(), mask)
        self._explained = [SMOOTHING * old + new for old, new in zip(self._explained, (missed, spread), strict=True)]
        missed, spread = self._explained
        explained = 1 - missed / spread if spread > 1e-6 else torch.nan  # returns that are all alike
        return {"value/mean": self._mean(found.values, mask), "value/explained_variance": explained}

    def _adapt(self, found: Experience) -> dict[str, float]:
        """Moves the KL weight towards its target, for the next rollout."""
        if not self._options.kl_target:
            return {}
        used = self._beta
        kl = self._mean(kl_estimate(found.old, found.old, found.reference), found.mask)
        self._beta = adapted_beta(used, kl, self._options.kl_target)
        return {"kl_beta": used}

    def _mean(self, values: Tensor, mask: Tensor) -> float:
        """Over the masked tokens of all processes."""
        summed, count = self._total(torch.stack([(values * mask).sum(), mask.sum()]).double()).tolist()
        return summed / max(count, 1)

    def _total(self, values: Tensor) -> Tensor:
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
        snapshot.save(folder, self._models.trained, self.optimizer, progress)

    def load(self, folder: Path) -> dict[str, Any]:
        """See Loop."""
        progress = snapshot.load(folder, self._models.trained, self.optimizer)
        self._beta, self._explained = progress["beta"], progress["explained"]
        self._prior.restore(progress["prior"])
        self.scheduler.load_state_dict(progress["schedule"])
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        return progress
