"""What PPO learns from: rollouts as tensors, scored by policy, critic and reference, with advantages.

Prompts are padded on the left, responses on the right; [B, T] runs over response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from accelerate import Accelerator
from torch import Tensor

from specrl.rollout.types import Completion, Row
from specrl.trainers.ppo import objectives
from specrl.trainers.ppo.critic import Models

if TYPE_CHECKING:
    from specrl.trainers.rollouts import Rollouts
    from specrl.trainers.scored import Scored
    from specrl.trainers.setup import Setup

SMOOTHING = 0.9  # of the explained variance, whose parts are small and noisy if a rollout's rewards are nearly equal


@dataclass
class Responses:
    """Prompts with their responses."""

    ids: Tensor
    """Prompt and response [B, P + T]."""
    attention: Tensor
    """1 for tokens, 0 for padding [B, P + T]."""
    mask: Tensor
    """1 for the policy's tokens of rows with a reward, later only of those that are trained on; else 0 [B, T]."""
    rollout_logprobs: Tensor
    """The engine's log-probs [B, T]."""

    @classmethod
    def of(
        cls, rows: Sequence[Row], done: Sequence[Completion], known: Sequence[bool], pad_id: int, device: torch.device
    ) -> Responses:
        """Pads the rows. A row whose reward is not `known` gets no mask."""
        prompt_length = max(len(row.prompt) for row in rows)
        response_length = max(len(c.tokens) for c in done)
        ids = torch.full((len(rows), prompt_length + response_length), pad_id)
        attention = torch.zeros_like(ids)
        logprobs = torch.zeros(len(rows), response_length)
        mask = torch.zeros_like(logprobs)
        for i, (row, c) in enumerate(zip(rows, done, strict=True)):
            length = len(c.tokens)
            start = prompt_length - len(row.prompt)
            ids[i, start : prompt_length + length] = torch.tensor([*row.prompt, *c.tokens])
            attention[i, start : prompt_length + length] = 1
            logprobs[i, :length] = torch.tensor(c.logprobs)
            mask[i, :length] = float(known[i])
            if c.mask is not None:
                mask[i, :length] *= torch.tensor(c.mask)
        return Responses(ids.to(device), attention.to(device), mask.to(device), logprobs.to(device))

    @property
    def length(self) -> int:
        """T."""
        return self.mask.shape[1]

    def select(self, rows: slice) -> Self:
        """Some of the rows."""
        return type(self)(**{field.name: _select(getattr(self, field.name), rows) for field in fields(self)})

    def split(self, rows: int) -> Iterator[Self]:
        """Consecutive parts of this many rows."""
        return (self.select(slice(i, i + rows)) for i in range(0, len(self.ids), rows))


class ValueTargets(NamedTuple):
    """What the critic is trained on [B, T]."""

    values: Tensor
    """Its values before the update."""
    returns: Tensor


@dataclass
class Experience(Responses):
    """Responses with all that an update needs."""

    policy_logprobs: Tensor
    """The trainer's log-probs before the update [B, T]."""
    old_logprobs: Tensor
    """The denominator of an update's ratios: the engine's or the trainer's log-probs [B, T]."""
    advantages: Tensor
    critic: ValueTargets | None = None
    reference_logprobs: Tensor | None = None
    """Under the initial policy [B, T]; None without a KL penalty."""


def _select(part: Any, rows: slice) -> Any:
    """Rows of a tensor or of a tuple of tensors; None stays None."""
    if isinstance(part, ValueTargets):
        return ValueTargets(*(tensor[rows] for tensor in part))
    return None if part is None else part[rows]


class ExperienceMaker:
    """Turns a rollout into experience: log-probs and values, then rewards and advantages.

    Checkpoints hold its state: the KL weight and the smoothed explained variance.

    Args:
        rows_per_pass: of a forward pass.
    """

    def __init__(
        self,
        models: Models,
        setup: Setup,
        accelerator: Accelerator,
        *,
        rows_per_pass: int,
        pad_id: int,
    ):
        self._models = models
        self._options = setup.trainer
        self._group_size = setup.rollout.group_size
        self._rows_per_pass = rows_per_pass
        self._pad_id = pad_id
        self._accelerator = accelerator
        self._explained = [0.0, 0.0]  # smoothed variances of the critic's errors, and of returns
        self.beta = setup.trainer.beta
        """The KL weight of the next update."""

    def make(self, sampled: Scored, rollouts: Rollouts) -> tuple[Experience, dict[str, float]]:
        """The experience of a rollout, and metrics that are equal in every process.

        Truncated rows that `mask_truncated` leaves out of the loss keep their rewards in every baseline.
        """
        device = self._accelerator.device
        known = [reward is not None for reward in sampled.rewards]
        totals = torch.tensor([torch.nan if r is None else r for r in sampled.rewards], device=device)
        responses = Responses.of(sampled.rows, sampled.batch.completions, known, self._pad_id, device)
        batch = self._scored(responses, rollouts.old_from_engine)
        left_out = [self._options.mask_truncated and c.finish == "length" for c in sampled.batch.completions]
        train_mask = batch.mask * (1 - torch.tensor(left_out, device=device)[:, None].float())
        ratios = rollouts.importance(batch.rollout_logprobs, train_mask, lambda: batch.policy_logprobs)
        batch = self._with_advantages(batch, totals)
        advantages = batch.advantages if ratios is None else batch.advantages * ratios
        batch = replace(batch, advantages=advantages, mask=train_mask)
        metrics = response_metrics(sampled.batch.completions, totals, self._group_size, self._accelerator.gather)
        return batch, metrics | self._value_metrics(batch) | self._adapt_beta(batch)

    @torch.no_grad()
    def _scored(self, responses: Responses, old_from_engine: bool) -> Experience:
        """Adds the log-probs of policy and reference, and the values. The advantages are still 0."""
        trained, reference, reference_context = self._models
        trained.eval()
        passes = [(part.ids, part.attention, responses.length) for part in responses.split(self._rows_per_pass)]
        outputs = [trained(*inputs) for inputs in passes]
        logp = torch.cat([out.logp for out in outputs])
        old = responses.rollout_logprobs if old_from_engine else logp
        zeros = torch.zeros_like(logp)
        batch = Experience(**vars(responses), policy_logprobs=logp, old_logprobs=old, advantages=zeros)
        if trained.value is not None:
            batch.critic = ValueTargets(torch.cat([out.values for out in outputs]), returns=zeros)
        if reference is not None:
            with reference_context(), self._accelerator.autocast():
                batch.reference_logprobs = torch.cat([reference(*inputs).logp for inputs in passes])
        return batch

    def _with_advantages(self, batch: Experience, totals: Tensor) -> Experience:
        """The batch with advantages and, for a critic, returns [B, T] from total rewards [B]."""
        options = self._options
        mask = batch.mask
        kl = torch.zeros_like(mask)
        if batch.reference_logprobs is not None and options.kl_penalty == "reward":
            kl = batch.old_logprobs - batch.reference_logprobs
        rewards = objectives.token_rewards(totals, kl, mask, self.beta)
        critic = batch.critic
        if critic is not None:
            gamma, lam = options.gamma, options.gae_lambda
            advantages, returns = objectives.gae(rewards, critic.values, mask, gamma=gamma, lam=lam)
            advantages = objectives.whiten(advantages, mask, self._all_reduce)
            critic = critic._replace(returns=returns)
        elif options.advantage == "rloo":
            advantages = self._rloo_advantages(batch, rewards)
        else:
            advantages = objectives.reinforce_plus_plus(rewards, mask, options.gamma, self._all_reduce)
        return replace(batch, advantages=advantages, critic=critic)

    def _rloo_advantages(self, batch: Experience, rewards: Tensor) -> Tensor:
        sums = rewards.sum(-1).masked_fill(batch.mask.sum(-1) == 0, torch.nan)
        first = self._accelerator.process_index * len(sums)
        # All processes' rows are gathered, as a group may continue in the next process.
        advantages = objectives.rloo(self._accelerator.gather(sums), self._group_size)[first : first + len(sums)]
        return advantages[:, None] * batch.mask

    def _value_metrics(self, batch: Experience) -> dict[str, float]:
        if batch.critic is None:
            return {}
        values, returns = batch.critic
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
        beta = self.beta
        kl = objectives.kl_estimate(batch.old_logprobs, batch.old_logprobs, batch.reference_logprobs)
        self.beta = objectives.adapted_beta(beta, self._mean(kl, batch.mask), self._options.kl_target)
        return {"kl_beta": beta}

    def _mean(self, values: Tensor, mask: Tensor) -> float:
        """Over the masked tokens of all processes."""
        total, count = self._all_reduce(torch.stack([(values * mask).sum(), mask.sum()]).double()).tolist()
        return total / max(count, 1)

    def _all_reduce(self, values: Tensor) -> Tensor:
        """Sum over processes."""
        return self._accelerator.reduce(values, "sum")

    def state(self) -> dict[str, Any]:
        """What `restore` takes, as JSON types."""
        return {"beta": self.beta, "explained": self._explained}

    def restore(self, state: dict[str, Any]) -> None:
        self.beta = state["beta"]
        self._explained = state["explained"]


def response_metrics(
    done: Sequence[Completion], totals: Tensor, group_size: int, gather: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Rewards and lengths of the rollout of all processes, groups side by side, under TRL's names.

    Args:
        totals: rewards of this process's rows, NaN for none [B].
        group_size: responses of a prompt.
        gather: concatenates a tensor over all processes.
    """
    lengths = gather(torch.tensor([c.sampled for c in done], device=totals.device))
    ended = gather(torch.tensor([c.finish == "stop" for c in done], device=totals.device))
    rewards = gather(totals)
    groups = rewards.view(-1, group_size)
    known = ~groups.isnan().all(-1)
    low = groups.nan_to_num(torch.inf).amin(-1)
    high = groups.nan_to_num(-torch.inf).amax(-1)
    scored = rewards[~rewards.isnan()]
    metrics = {
        "reward": scored.mean().item(),
        "reward_std": scored.std(correction=int(len(scored) > 1)).item(),
        "frac_reward_zero_std": (high - low)[known].eq(0).float().mean().item(),
        "completions/clipped_ratio": 1 - ended[lengths > 0].float().mean().item(),
    }
    for kind, chosen in (("", lengths > 0), ("terminated_", ended)):
        selected = lengths[chosen].float()
        if len(selected):
            metrics[f"completions/mean_{kind}length"] = selected.mean().item()
            metrics[f"completions/min_{kind}length"] = selected.min().item()
            metrics[f"completions/max_{kind}length"] = selected.max().item()
    return metrics
