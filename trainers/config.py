"""Configuration of the trainers. No heavy imports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specrl.rollout.sections import doc


@dataclass
class DrafterConfig:
    train: bool = doc(
        False, "co-train rollout.drafter=DIR, a model or a head, towards the policy, on states of the update's forward"
    )
    objective: Literal["forward_kl", "tvd"] = doc("tvd", "distance from the policy's law")
    learning_rate: float = doc(1e-4, "AdamW learning rate")
    interval: int = doc(1, "optimiser steps between two rounds of co-training", low=1)
    share: float = doc(0.03, "share of each rollout's tokens, prompts included, that is learned from", high=1)
    updates: int = doc(4, "most gradient steps in one round, which bounds the tokens that are kept for it", low=1)
    tokens_per_update: int = doc(1024, "most tokens of a gradient step, prompts included", low=1)
    patience: int = doc(20, "rollouts over which co-training must save more time than it takes; 0 never judges")


@dataclass
class CriticConfig:
    model: Literal["head", "separate"] = doc(
        "head", "head: one more output of the policy; separate: a transformer of its own that starts as the policy's"
    )
    learning_rate: float = doc(1e-5, "AdamW learning rate of the head or the separate critic")
    clip: float = doc(0.2, "clip range of the value around the value before the update; 0 is off")
    loss_weight: float = doc(0.1, "weight of the value loss; a head's also trains the policy's trunk")


@dataclass
class TrainerConfig:
    algorithm: Literal["grpo", "dapo", "ppo"] = doc("grpo", "policy-gradient algorithm")
    advantage: Literal["gae", "rloo", "reinforce_plus_plus"] = doc(
        "gae", "advantages of algorithm=ppo: gae trains a critic; rloo and reinforce_plus_plus need none", only="ppo"
    )
    learning_rate: float = doc(1e-6, "AdamW learning rate")
    lr_schedule: Literal["constant", "linear", "cosine"] = doc("constant", "learning-rate schedule")
    warmup_steps: int = doc(0, "linear warm-up steps")
    epochs: int = doc(
        1,
        "passes over the training prompts; each leaves out those that fill no step, other ones each time",
        resume="length",
    )
    max_steps: int = doc(0, "stop after this many optimiser steps; 0 runs all epochs", resume="length")
    prompts_per_step: int = doc(8, "prompts in one optimiser step; rows = prompts_per_step * rollout.group_size", low=1)
    rows_per_pass: int = doc(
        0, "rows in one training forward/backward pass; 0 takes all rows of the step", resume="free"
    )
    updates_per_rollout: int = doc(
        1, "optimiser passes over each rollout batch (mu); above 1 the batch becomes off-policy", low=1
    )
    minibatches: int = doc(
        1, "optimiser steps in each pass over the rollout batch, on parts of it (ppo)", low=1, only="ppo"
    )
    clip: float | Literal["auto"] = doc(
        "auto", "clip range of the probability ratio; auto: 0.2, or 3e-4 for ratio=sequence, as in GSPO's paper", high=1
    )
    ratio: Literal["token", "sequence"] = doc(
        "token",
        "what is clipped: each token's ratio, or the response's, its tokens' geometric mean (GSPO)",
        only="grpo",
    )
    clip_high: float = doc(
        0.0, "upper clip range; 0 means: same as clip, or 0.28 (dapo clip-higher), or 4e-4 (ratio=sequence, clip=auto)"
    )
    beta: float = doc(0.0, "weight of the penalty KL(policy, initial policy)")
    kl_penalty: Literal["reward", "loss"] = doc(
        "reward", "what ppo adds the penalty to: each token's reward, or the loss", only="ppo"
    )
    kl_target: float = doc(0.0, "KL per token, in nats, that ppo holds by adapting beta; 0 keeps beta", only="ppo")
    entropy_bonus: float = doc(0.0, "weight of the entropy in ppo's loss", only="ppo")
    gamma: float = doc(1.0, "discount per token (ppo)", high=1, only="ppo")
    gae_lambda: float = doc(1.0, "GAE's trade of bias for variance; 1 takes whole returns (ppo)", high=1, only="ppo")
    loss: Literal["auto", "grpo", "dapo", "dr_grpo", "bnpo"] = doc(
        "auto", "loss aggregation; auto: grpo, or dapo token-level", only="grpo"
    )
    scale_rewards: Literal["group", "batch", "none"] = doc("group", "what the advantage is divided by", only="grpo")
    mask_truncated: bool = doc(
        False, "leave truncated responses out of the loss (DAPO overlong filtering); baselines keep their rewards"
    )
    overlong_buffer: int | Literal["auto"] = doc(
        "auto",
        "DAPO soft overlong punishment: tokens before the cap over which the penalty grows to 1; 0 is off; auto: a "
        "fifth of the cap for dapo, else off",
    )
    refills: int | Literal["auto"] = doc(
        "auto",
        "DAPO dynamic sampling: how often in a step further prompts are rolled out, at most, to replace groups whose "
        "rewards are all alike before the overlong penalty; 0 is off; auto: 10 for dapo, else off",
        only="grpo",
    )
    max_grad_norm: float = doc(1.0, "gradient clipping")
    weight_decay: float = doc(0.0, "AdamW weight decay")
    old_logprobs: Literal["auto", "trainer", "engine"] = doc(
        "auto", "source of pi_old: the trainer's own pass, or the engine's log-probs; auto: trainer for exact and off"
    )
    correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = doc(
        "token_truncate",
        "weights p_new/behaviour for tokens of lossy rules or of an engine with other numerics; none trains as drawn",
    )
    correction_cap: float = doc(2.0, "largest weight (truncate) or largest admitted ratio (mask)", low=1)
    precision: Literal["fp32", "bf16", "pure_bf16"] = doc(
        "fp32",
        "fp32; bf16: fp32 weights and optimiser, the update in bf16 autocast, rollouts by a bf16 copy; pure_bf16: bf16 "
        "weights too, which hardly move at small learning rates",
    )
    gradient_checkpointing: bool = doc(
        False, "trade time for activation memory, of the policy and a separate critic", resume="free"
    )
    save_every: int = doc(0, "checkpoint every N steps; 0 only at the end", resume="free")
    keep_checkpoints: int = doc(2, "newest checkpoints kept", low=1, resume="free")
    eval_every: int = doc(
        0, "evaluate on the test split every N steps; 0 only before and after training", resume="free"
    )
    eval_prompts: int = doc(64, "prompts of the test split used in evaluation; 0 skips evaluation", resume="free")
    log_completions: int = doc(2, "completions shown on the console each time; 0 shows none", resume="free")
    log_completions_every: int = doc(
        10,
        "steps between completions on the console and in completions/, which has those of the first and the last step "
        "in any case",
        low=1,
        resume="free",
    )
    drafter: DrafterConfig = doc(DrafterConfig, "co-training of the draft model")
    critic: CriticConfig = doc(CriticConfig, "the value function of algorithm=ppo with advantage=gae", only="ppo")

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far the ratio may fall below 1 and rise above it. A response's ratio is a mean over its tokens and moves
        far less than a token's: the defaults are those of GSPO (arXiv 2507.18071) and of DAPO (arXiv 2503.14476)."""
        by_response = self.ratio == "sequence"
        low = (3e-4 if by_response else 0.2) if self.clip == "auto" else self.clip
        if self.clip_high or (by_response and self.clip != "auto"):
            return low, self.clip_high or low
        return low, 4e-4 if by_response else 0.28 if self.algorithm == "dapo" else low

    @property
    def refill_rounds(self) -> int:
        """Most rounds of dynamic sampling in a step."""
        return (10 if self.algorithm == "dapo" else 0) if self.refills == "auto" else self.refills

    def overlong_tokens(self, cap: int) -> int:
        """Tokens before the cap over which the overlong penalty grows; 0 never punishes."""
        return (cap // 5 if self.algorithm == "dapo" else 0) if self.overlong_buffer == "auto" else self.overlong_buffer

    @property
    def compares_groups(self) -> bool:
        """Whether advantages come from the responses to one prompt alone, so that equal rewards teach nothing."""
        return self.algorithm != "ppo" or self.advantage == "rloo"

    @property
    def steps_per_rollout(self) -> int:
        """Optimiser steps between two rollouts."""
        return self.updates_per_rollout * self.minibatches

    def problems(self) -> Iterator[str]:
        """Sentences about options that contradict each other or are of no use."""
        if self.clip == 0:
            yield "trainer.clip=0 lets no ratio pass. Try trainer.clip=auto."
        low, high = self.clip_range
        if high < low:
            yield f"trainer.clip_high={high} is below trainer.clip={low}. Try trainer.clip_high={low}."
        for key in ("save_every", "max_steps"):
            if rest := getattr(self, key) % self.steps_per_rollout:
                steps = f"updates_per_rollout={self.updates_per_rollout}"
                steps += f" times minibatches={self.minibatches}" if self.minibatches > 1 else ""
                yield (
                    f"trainer.{key}={getattr(self, key)} is no multiple of {steps}: the "
                    "checkpoint would cut a rollout in two, and a resume could not repeat it. "
                    f"Try trainer.{key}={getattr(self, key) - rest + self.steps_per_rollout}."
                )
        if not self.epochs and not self.max_steps:
            yield "trainer.epochs=0 and trainer.max_steps=0 train nothing. Try trainer.epochs=1."
        if self.algorithm == "ppo" and not self.beta and (self.kl_target or self.kl_penalty != "reward"):
            key = "kl_target" if self.kl_target else "kl_penalty"
            yield f"trainer.{key}={getattr(self, key)} needs a KL weight to begin with. Try trainer.beta=0.05."
