"""PPO (Schulman et al. 2017, arXiv 1707.06347) on TRL's GRPO loop: advantages per token, and a critic.

The clipped surrogate and the entropy bonus are TRL's.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from specrl.rollout.reduction import mean, shared
from specrl.rollout.types import RolloutError
from specrl.trainers.grpo.trainer import GRPOTrainerWithReuse, loss_mask
from specrl.trainers.ppo import objectives
from specrl.trainers.ppo.critic import Critic, recorded

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import GRPOConfig

    from specrl.trainers.setup import Setup

STATE = "ppo.safetensors"
"""The file of a checkpoint with the critic's weights."""


class PPOTrainer(GRPOTrainerWithReuse):
    """GRPOTrainerWithReuse with PPO's advantages and, for GAE, a critic that is trained with the policy."""

    def __init__(
        self,
        model: PreTrainedModel,
        args: GRPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        setup: Setup,
        peft_config: PeftConfig | None = None,
    ):
        options = setup.trainer
        critic = Critic(model, options.critic.model == "separate") if options.advantage == "gae" else None
        super().__init__(model, args, tokenizer, setup, peft_config)
        if critic is not None:
            if self.is_deepspeed_enabled:
                raise RolloutError(
                    "DeepSpeed clips a critic's gradients with the policy's. Launch with torchrun or with FSDP 2, or "
                    "take trainer.advantage=rloo"
                )
            if options.precision == "bf16":
                critic.float()  # all of it is trained, also where adapters leave the policy's weights in bf16
            critic.attach(model)
        self.critic = critic
        """Part of the policy; None without GAE."""

    # Advantages --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _estimate_advantages(self, out: dict[str, Any]) -> None:
        """Replaces TRL's advantages by PPO's [B, T]; adds old log-probs and, for a critic, old values and returns.

        Truncated rows that `mask_truncated` leaves out of the loss keep their rewards in every baseline.
        """
        options = self._options
        outputs: list[Any] = []
        logps = self._pass(out, recorded(self.model, outputs))
        old = out.setdefault("old_per_token_logps", logps)
        mask = loss_mask(out).float()
        kl = torch.zeros_like(mask)
        if "ref_per_token_logps" in out:
            kl = (old - out["ref_per_token_logps"]) * mask
        batch = self.rollouts.train_batch
        totals = torch.tensor([torch.nan if reward is None else reward for reward in batch.rewards], device=mask.device)
        rewards = objectives.token_rewards(totals, kl, mask, self.beta)
        if self.critic is not None:
            values = torch.cat([output.value for output in outputs])[:, -mask.shape[1] :]
            advantages, returns = objectives.gae(rewards, values, mask, gamma=options.gamma, lam=options.gae_lambda)
            advantages = objectives.whiten(advantages, mask, self._all_reduce)
            out |= {"old_values": values, "returns": returns}
            self._note_values(values, returns, mask)
        elif options.advantage == "rloo":
            advantages = self._rloo(rewards, mask)
        else:
            advantages = objectives.reinforce_plus_plus(rewards, mask, options.gamma, self._all_reduce)
        if self.beta:
            self.note({"kl": shared(self._mean(kl, mask))})
        left_out = [options.mask_truncated and c.finish == "length" for c in batch.batch.completions]
        out["completion_mask"] *= ~torch.tensor(left_out, device=mask.device)[:, None]
        out["num_items_in_batch"] = self._all_reduce(loss_mask(out).sum())
        out["advantages"] = advantages

    def _rloo(self, rewards: Tensor, mask: Tensor) -> Tensor:
        sums = rewards.sum(-1).masked_fill(mask.sum(-1) == 0, torch.nan)
        first = self.accelerator.process_index * len(sums)
        # All processes' rows are gathered, as a group may continue in the next process.
        advantages = objectives.rloo(self.accelerator.gather(sums), self.num_generations)[first : first + len(sums)]
        return advantages[:, None] * mask

    def _note_values(self, values: Tensor, returns: Tensor, mask: Tensor) -> None:
        variance = self._variance(returns, mask)
        explained = 1 - self._variance(returns - values, mask) / variance if variance > 1e-6 else torch.nan
        self.note({"value/mean": shared(self._mean(values, mask)), "value/explained_variance": shared(explained)})

    def _mean(self, values: Tensor, mask: Tensor) -> float:
        """Over the masked tokens of all processes."""
        total, count = self._all_reduce(torch.stack([(values * mask).sum(), mask.sum()]).double()).tolist()
        return total / max(count, 1)

    def _variance(self, values: Tensor, mask: Tensor) -> float:
        return self._mean((values - self._mean(values, mask)).square(), mask)

    def _all_reduce(self, values: Tensor) -> Tensor:
        """Sum over processes."""
        return self.accelerator.reduce(values, "sum")

    # Loss --------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss, plus the critic's from the same pass, in which every token of all processes weighs the same."""
        outputs: list[Any] = []
        beta, self.beta = self.beta, 0.0  # the penalty is in the rewards
        loss = super()._compute_loss(recorded(model, outputs), inputs)
        self.beta = beta
        passes = self.current_gradient_accumulation_steps
        self.note({"policy_loss": mean(loss.item(), 1 / passes)})
        if self.critic is None:
            return loss
        options = self._options.critic
        mask = loss_mask(inputs)
        values = outputs[0].value[:, -mask.shape[1] :]
        error = (objectives.value_loss(values, inputs["old_values"], inputs["returns"]) * mask).sum()
        self.note({"value_loss": mean(error.item(), mask.sum().item())})
        tokens = inputs["num_items_in_batch"].clamp(min=1) * passes / self.args.steps_per_generation
        return loss + options.loss_weight * error * self.accelerator.num_processes / tokens

    # Optimiser ---------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As transformers' Trainer, with the critic's weights in a group of their own, the last."""
        if self.critic is None or self.optimizer is not None:
            return super().create_optimizer(model)
        optimizer = super().create_optimizer(model)
        critic = dict.fromkeys(self.critic.parameters())
        for group in optimizer.param_groups:
            group["params"] = [weight for weight in group["params"] if weight not in critic]
        rate = self._options.critic.learning_rate
        optimizer.add_param_group({"params": [*critic], "lr": rate, "weight_decay": self.args.weight_decay})
        return optimizer

    def _clip_grad_norm(self, model: torch.nn.Module) -> Tensor:
        """Clips policy and critic separately, so that the critic's errors do not shrink the policy's step."""
        if self.critic is None or self.optimizer is None:
            return super()._clip_grad_norm(model)
        *policy, critic = (group["params"] for group in self.optimizer.param_groups)
        norm = self.accelerator.clip_grad_norm_(critic, self.args.max_grad_norm)
        self.note({"value/grad_norm": shared(norm.item())})
        return self.accelerator.clip_grad_norm_([*chain(*policy)], self.args.max_grad_norm)

    # Checkpoints -------------------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.critic is None:
            return
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = get_model_state_dict(self.critic, options=whole)
        if self.args.should_save:
            save_file(state, Path(output_dir) / STATE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.critic is not None:
            state: dict[str, Any] = load_file(Path(checkpoint) / STATE)
            set_model_state_dict(self.critic, state, options=StateDictOptions(full_state_dict=True))
