"""The options `trainer.*`. This module imports nothing heavy: `help=true` must answer in about a second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specrl.rollout.sections import doc


@dataclass
class DrafterConfig:
    train: bool = doc(False, "train rollout.drafter along with the policy, on hidden states of its update")
    learning_rate: float = doc(1e-4, "AdamW learning rate")
    share: float = doc(0.03, "share of each rollout's tokens to train on, prompts included", high=1)


@dataclass
class CriticConfig:
    model: Literal["head", "separate"] = doc(
        "head", "head: one more output of the policy; separate: a transformer initialised from it"
    )
    learning_rate: float = doc(1e-5, "AdamW learning rate")
    loss_weight: float = doc(0.1, "weight of the value loss, which also trains the layers below a head")


@dataclass
class TrainerConfig:
    algorithm: Literal["grpo", "dapo", "ppo"] = doc("grpo", "policy-gradient algorithm")
    advantage: Literal["gae", "rloo", "reinforce_plus_plus"] = doc(
        "gae", "advantages of ppo; only gae trains a critic", only="ppo"
    )
    learning_rate: float = doc(1e-6, "AdamW learning rate")
    lr_schedule: Literal["constant", "linear", "cosine"] = doc("constant", "learning-rate schedule")
    warmup_steps: int = doc(0, "optimiser steps of linear warm-up")
    epochs: int = doc(1, "passes over the training prompts; an incomplete last batch is dropped")
    max_steps: int = doc(0, "stop after this many optimiser steps; 0 runs all epochs")
    prompts_per_step: int = doc(8, "prompts per rollout, each with rollout.group_size rows", low=1)
    rows_per_pass: int = doc(0, "rows per forward and backward pass of the update; 0 is all")
    updates_per_rollout: int = doc(1, "optimiser passes over a rollout batch (mu); above 1 is off-policy", low=1)
    minibatches: int = doc(1, "optimiser steps of a pass over the rollout batch (ppo)", low=1, only="ppo")
    clip: float | Literal["auto"] = doc(
        "auto", "clip range of the probability ratio; auto: 0.2, or 3e-4 for ratio=sequence as in GSPO", high=1
    )
    ratio: Literal["token", "sequence"] = doc(
        "token", "clipped ratio: each token's, or the response's geometric mean (GSPO)", only="grpo"
    )
    clip_high: float = doc(0.0, "upper clip range; 0: clip, but 0.28 for dapo, 4e-4 for ratio=sequence with clip=auto")
    beta: float = doc(0.0, "weight of the penalty KL(policy, initial policy), in the loss, with ppo in the rewards")
    entropy_bonus: float = doc(0.0, "weight of the entropy in ppo's loss", only="ppo")
    gamma: float = doc(1.0, "discount per token (ppo)", high=1, only="ppo")
    gae_lambda: float = doc(1.0, "lambda of GAE; 1 uses full returns (ppo)", high=1, only="ppo")
    loss: Literal["auto", "grpo", "dapo", "dr_grpo", "bnpo"] = doc(
        "auto", "loss aggregation as in TRL; auto: that of the algorithm", only="grpo"
    )
    scale_rewards: Literal["group", "batch", "none"] = doc(
        "group", "standard deviation that advantages are divided by", only="grpo"
    )
    mask_truncated: bool = doc(False, "exclude truncated responses from the loss (DAPO's overlong filtering)")
    overlong_buffer: int | Literal["auto"] = doc(
        "auto",
        "DAPO's soft overlong punishment: tokens before the length limit over which it grows to 1; 0 is off; auto: a "
        "fifth of the limit for dapo, else off",
    )
    refills: int | Literal["auto"] = doc(
        "auto",
        "DAPO's dynamic sampling: most rounds that replace groups with equal rewards by further prompts; 0 is off; "
        "auto: 10 for dapo, else off",
        only="grpo",
    )
    max_grad_norm: float = doc(1.0, "gradient norm to clip to")
    weight_decay: float = doc(0.0, "AdamW weight decay")
    old_logprobs: Literal["auto", "trainer", "engine"] = doc(
        "auto", "who computes pi_old: a pass of the trainer, or the engine; auto: trainer for acceptance=exact and off"
    )
    correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = doc(
        "token_truncate",
        "importance weights p_trainer/p_rollout for lossy acceptance or an engine with other numerics",
    )
    correction_cap: float = doc(2.0, "largest weight (truncate), or largest ratio that is not masked (mask)", low=1)
    precision: Literal["fp32", "bf16", "pure_bf16"] = doc(
        "fp32",
        "bf16: fp32 weights and optimiser, bf16 autocast, a bf16 copy for rollouts; pure_bf16: bf16 weights too, which "
        "hardly move at small learning rates",
    )
    gradient_checkpointing: bool = doc(False, "recompute activations in backward, to save memory")
    save_every: int = doc(0, "steps between checkpoints; 0 saves only at the end")
    keep_checkpoints: int = doc(2, "newest checkpoints to keep", low=1)
    eval_every: int = doc(0, "steps between evaluations on the test split; 0: only before and after training")
    eval_prompts: int = doc(64, "prompts of the test split per evaluation; 0 skips evaluation")
    log_completions_every: int = doc(
        10,
        "steps between console samples and between files in completions/; the first and last step always write one",
        low=1,
    )
    drafter: DrafterConfig = doc(DrafterConfig, "co-training of the draft model")
    critic: CriticConfig = doc(CriticConfig, "the value function of algorithm=ppo with advantage=gae", only="ppo")

    @property
    def clip_range(self) -> tuple[float, float]:
        """The clip range of the ratio, as distances below and above 1.

        The ratio of a response is a mean over its tokens and varies far less than that of a token, so GSPO's defaults
        (arXiv 2507.18071) are smaller than DAPO's (arXiv 2503.14476).
        """
        by_response = self.ratio == "sequence"
        automatic = 3e-4 if by_response else 0.2
        low = automatic if self.clip == "auto" else self.clip
        if self.clip_high or (by_response and self.clip != "auto"):
            return low, self.clip_high or low
        if by_response:
            return low, 4e-4
        return low, 0.28 if self.algorithm == "dapo" else low

    @property
    def refill_rounds(self) -> int:
        """Maximum rounds of dynamic sampling in a step."""
        if self.refills == "auto":
            return 10 if self.algorithm == "dapo" else 0
        return self.refills

    def overlong_tokens(self, cap: int) -> int:
        """Number of tokens before the limit `cap` over which the overlong penalty grows; 0 disables it."""
        if self.overlong_buffer == "auto":
            return cap // 5 if self.algorithm == "dapo" else 0
        return self.overlong_buffer

    @property
    def compares_groups(self) -> bool:
        """Whether advantages compare the responses to one prompt, so that equal rewards give no gradient."""
        return self.algorithm != "ppo" or self.advantage == "rloo"

    @property
    def steps_per_rollout(self) -> int:
        """Optimiser steps between two rollouts."""
        return self.updates_per_rollout * self.minibatches

    def rollouts_per_epoch(self, prompts: int) -> int:
        """Rollout batches in an epoch over `prompts` training prompts; an incomplete last batch is dropped."""
        return prompts // self.prompts_per_step

    def steps_per_epoch(self, prompts: int) -> int:
        """Optimiser steps in an epoch over `prompts` training prompts."""
        return self.rollouts_per_epoch(prompts) * self.steps_per_rollout

    def total_steps(self, prompts: int) -> int:
        """Optimiser steps of a run on `prompts` training prompts: max_steps if it is set, otherwise all epochs."""
        return self.max_steps or self.steps_per_epoch(prompts) * self.epochs

    def problems(self) -> Iterator[str]:
        """Yields messages about options that contradict each other. `<key>` is a placeholder for `key=value`."""
        if self.clip == 0:
            yield "trainer.clip=0 clips every ratio. Try trainer.clip=auto."
        low, high = self.clip_range
        if high < low:
            yield f"trainer.clip_high={high} is below trainer.clip={low}. Try trainer.clip_high={low}."
        for key in ("save_every", "max_steps"):
            if rest := getattr(self, key) % self.steps_per_rollout:
                yield (
                    f"<trainer.{key}> is no multiple of <trainer.updates_per_rollout> times <trainer.minibatches>"
                    ": a checkpoint in the middle of a rollout cannot be resumed from. "
                    f"Try trainer.{key}={getattr(self, key) - rest + self.steps_per_rollout}."
                )
        if not self.epochs and not self.max_steps:
            yield "<trainer.epochs> and <trainer.max_steps> train nothing. Try trainer.epochs=1."
