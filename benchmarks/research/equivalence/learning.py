"""One training run on the toy: the product's rollouts, losses and advantages in a small loop."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from benchmarks.research.equivalence import toy
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
from specrl.rollout.config import RolloutConfig
from specrl.rollout.control import Control
from specrl.rollout.keys import Visits
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import Completion, RolloutBatch, Row
from specrl.trainers.correction import correction_weights
from specrl.trainers.ppo.objectives import gae, token_rewards, whiten

Algorithm = Literal["grpo", "ppo"]
PROMPTS, GROUP, PROMPTS_PER_STEP, EPOCHS = 24, 8, 12, 10
LEARNING_RATE, UPDATES, CLIP, CAP = 0.04, 2, 0.2, 2.0
OTHER_NOISE = 1_000_003
"""Added to the seed that keys derive from, for a run that shares everything but noise."""


@dataclass(frozen=True)
class Arm:
    """A rollout rule to train with."""

    name: str
    rollout: dict = field(default_factory=dict)
    """Options of RolloutConfig."""
    noise: int = 0
    """Added to the seed of the noise; the task, the initial policy and the order of prompts stay."""
    constant: bool = False
    """Planted fault: every visit uses the noise of the first, for acceptance too (the reference's seed=1234)."""
    correction: str = "token_truncate"
    """`trainer.correction` of lenient rules."""


@dataclass
class Outcome:
    """What one run did."""

    start: float
    """Exact expected reward of the initial policy, mean over tasks."""
    final: float
    """The same of the trained policy."""
    gaps: list[float] = field(default_factory=list)
    """By step from the second epoch on: mean reward of the batch less its exact expectation under the same weights."""
    tokens: int = 0
    passes: int = 0
    reused: int = 0
    rejected: int = 0
    unchanged: int = 0
    """Tokens of the second epoch on, passes of their rows, tokens from drafts, rejected draft tokens, and
    responses that are their sample's last one."""
    recorded: dict[str, float] = field(default_factory=lambda: {"reused": 0.0, "new": 0.0, "stored": 0.0})
    """Largest |engine's log-prob - recomputed one| of reused and of new tokens; `stored`: of those that weights
    divide by."""
    clipped: float = 0.0
    """Largest share of tokens clipped at the first inner step."""
    digest: str = ""
    """Of all tokens that were sampled."""

    @property
    def gap(self) -> float:
        return sum(self.gaps) / len(self.gaps)


@dataclass
class Experience:
    """A rollout as tensors [B, T] over response tokens, padded on the right."""

    places: tuple[Tensor, Tensor, Tensor]
    """Task, last symbol and next symbol of every token."""
    mask: Tensor
    """1 for response tokens."""
    rollout_logprobs: Tensor
    """The engine's log-probs."""
    old_logprobs: Tensor
    """The trainer's, before the update."""
    advantages: Tensor
    values: Tensor | None = None
    """The critic's, before the update; None for GRPO."""
    returns: Tensor | None = None

    @property
    def length(self) -> int:
        """T."""
        return self.mask.shape[1]


class Run:
    """Trains one policy.

    Args: seed decides the task, the initial policy and the order of prompts, and with `arm.noise` the keys.
    """

    def __init__(self, arm: Arm, algorithm: Algorithm, seed: int):
        self.arm, self.algorithm, self.seed = arm, algorithm, seed
        self.right = toy.right_transitions(seed)
        self._right = self.right.tolist()
        self.policy = toy.TablePolicy(toy.initial_logits(seed, self.right))
        self.values = torch.zeros(toy.TASKS, toy.SYMBOLS, toy.CAP, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.policy.head.weight, self.values], lr=LEARNING_RATE)
        config = RolloutConfig(max_new_tokens=toy.CAP, measure_every=0, draft_tokens=toy.CAP)
        for name, value in arm.rollout.items():
            setattr(config, name, value)
        engine = toy.engine_of(self.policy, config)
        cache = TrajectoryCache(Fingerprint({}, {}))
        self.rollout, self.visits = SpeculativeRollout(engine, cache, config, seed + arm.noise), Visits()
        self.control = Control(self.rollout, self._rewards, strict=True)
        self.outcome = Outcome(start=self.expected.mean().item(), final=0.0)
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def expected(self) -> Tensor:
        """Exact expected reward of each task now."""
        return toy.expected_rewards(self.policy.logits, self.right)

    def train(self) -> Outcome:
        step = 0
        for epoch in range(EPOCHS):
            order = torch.randperm(PROMPTS, generator=torch.Generator().manual_seed(self.seed * 1009 + epoch))
            for prompts in order.split(PROMPTS_PER_STEP):
                self._step(prompts.tolist(), epoch, step)
                step += 1
        self.outcome.final = self.expected.mean().item()
        self.outcome.digest = self._digest.hexdigest()
        return self.outcome

    def _step(self, prompts: Sequence[int], epoch: int, step: int) -> None:
        rows = [Row(f"prompt-{i}", (i % toy.TASKS, toy.END)) for i in prompts for _ in range(GROUP)]
        sample_indices = [i % GROUP for i in range(len(rows))]
        self.rollout.engine.update_weights(None, step)
        visit = 0 if self.arm.constant else self.visits.next([row.example_id for row in rows])
        batch = self.rollout.generate(rows, visit=visit, step=step, sample_indices=sample_indices)
        rewards = self._rewards(rows, [c.tokens for c in batch.completions])
        found = self._experience(rows, batch.completions)
        self._observe(rows, batch, rewards, found, first=epoch == 0)
        self.rollout.store(rows, batch, step=step, rewards=rewards)
        self.control(rows, batch, rewards, step=step)
        self._advantages(found, torch.tensor(rewards))
        if self.arm.rollout.get("acceptance") == "lenient":  # as Rollouts.importance does
            behaviour = padded([c.behaviour_logprobs for c in batch.completions], found.length)
            found.advantages *= correction_weights(found.old_logprobs, behaviour, found.mask, self.arm.correction, CAP)
        for _ in range(UPDATES):
            self._update(found)

    def _rewards(self, rows: Sequence[Row], responses: Sequence[Sequence[int]]) -> list[float]:
        return [toy.reward(tokens, self._right[r.prompt[0]]) for r, tokens in zip(rows, responses, strict=True)]

    # Update ------------------------------------------------------------------------------------------------------

    def _experience(self, rows: Sequence[Row], done: Sequence[Completion]) -> Experience:
        """The rollout with old log-probs; the advantages are still 0."""
        length = max(len(c.tokens) for c in done)
        texts = zip(rows, done, strict=True)
        ids = torch.tensor([[*r.prompt, *c.tokens, *(length - len(c.tokens)) * [toy.END]] for r, c in texts])
        last, following = ids[:, 1:-1], ids[:, 2:]
        mask = (torch.arange(length) < torch.tensor([[len(c.tokens)] for c in done])).float()
        zeros = torch.zeros_like(mask)
        recorded = padded([c.logprobs for c in done], length)
        found = Experience((ids[:, :1].expand_as(last), last, following), mask, recorded, zeros, zeros)
        found.old_logprobs = self._logp(found).detach()
        return found

    def _logp(self, found: Experience) -> Tensor:
        return self.policy.logits.log_softmax(-1)[found.places] * found.mask

    def _value(self, found: Experience) -> Tensor:
        task, last, _ = found.places
        return self.values[task, last, torch.arange(found.length)]

    def _advantages(self, found: Experience, rewards: Tensor) -> None:
        """As the trainers: GRPO's normalised by group, PPO's from the critic by GAE."""
        if self.algorithm == "grpo":
            groups = rewards.view(-1, GROUP)
            normal = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
            found.advantages = normal.flatten()[:, None] * found.mask
            return
        found.values = self._value(found).detach()
        totals = token_rewards(rewards, torch.zeros_like(found.mask), found.mask, 0.0)
        advantages, found.returns = gae(totals, found.values, found.mask, gamma=1.0, lam=1.0)
        found.advantages = whiten(advantages, found.mask)

    def _update(self, found: Experience) -> None:
        """One optimiser step in which every token weighs the same."""
        ratio = (self._logp(found) - found.old_logprobs).exp()
        loss = -torch.minimum(ratio * found.advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * found.advantages)
        if found.values is not None and found.returns is not None:
            loss = loss + (self._value(found) - found.returns).square() / 2
        self.optimizer.zero_grad()
        ((loss * found.mask).sum() / found.mask.sum()).backward()
        self.optimizer.step()

    # Measurement -------------------------------------------------------------------------------------------------

    def _observe(self, rows, batch: RolloutBatch, rewards: list[float], found: Experience, first: bool) -> None:
        """Notes what the batch is worth and cost."""
        outcome, done = self.outcome, batch.completions
        for c in done:
            self._digest.update(bytes([*c.tokens, 255]))
        self._compare(found, done)
        if first:
            return
        expected = self.expected[[row.prompt[0] for row in rows]].mean().item()
        outcome.gaps.append(sum(rewards) / len(rewards) - expected)
        outcome.tokens += sum(len(c.tokens) for c in done)
        outcome.passes += sum(c.passes for c in done)
        outcome.reused += sum(sum(c.reused) for c in done)
        outcome.rejected += batch.stats.drafted - batch.stats.accepted
        outcome.unchanged += sum(batch.unchanged)

    def _compare(self, found: Experience, done: Sequence[Completion]) -> None:
        """On-policy identity: the log-probs that the rollout recorded are those of the weights that will be trained."""
        reused = torch.zeros_like(found.mask, dtype=torch.bool)
        for i, c in enumerate(done):
            reused[i, : len(c.tokens)] = torch.tensor(c.reused)
        gap = ((found.rollout_logprobs - found.old_logprobs) * found.mask).abs()
        stored = ((padded([c.behaviour_logprobs for c in done], found.length) - found.old_logprobs) * found.mask).abs()
        for name, values in (("reused", gap[reused]), ("new", gap[~reused]), ("stored", stored[reused])):
            if values.numel():
                self.outcome.recorded[name] = max(self.outcome.recorded[name], values.max().item())
        ratio = (found.old_logprobs - found.rollout_logprobs).exp()
        share = (((ratio < 1 - CLIP) | (ratio > 1 + CLIP)) * found.mask).sum() / found.mask.sum()
        self.outcome.clipped = max(self.outcome.clipped, share.item())


def padded(rows: Sequence[Sequence[float]], length: int) -> Tensor:
    """Rows of numbers as a tensor [B, length], right-padded with 0."""
    return torch.tensor([[*row, *(length - len(row)) * [0.0]] for row in rows])
