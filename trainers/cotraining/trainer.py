"""Co-training: keeps a drafter close to a moving policy, at the cost of a few gradient steps.

A drafter learns from hidden states that the policy's update computes of its texts anyway, and only after its agreement
with the policy there is measured. It learns the policy's distribution after each prefix, whoever wrote
the prefix. Under exact acceptance drafts decide only the speed of a rollout, and nothing here can change what is
sampled. Whatever goes wrong ends in co-training being off.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import TrainerCallback

from specrl.rollout.drafting.drafting import check_vocab
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.keys import derive_key
from specrl.rollout.reduction import Metric, count, mean, seconds, shared
from specrl.rollout.types import RolloutError
from specrl.trainers import snapshot
from specrl.trainers.config import DrafterConfig
from specrl.trainers.cotraining import distil
from specrl.trainers.cotraining.texts import Read, Tap, Text, chosen

logger = logging.getLogger(__name__)

UPDATES, TOKENS_PER_UPDATE = 4, 1024
"""Most gradient steps of a round, and most tokens of a step, prompts included."""
CausalLM = Any  # a model of transformers, a peft model around one, or a head: their stubs type parts as plain Module


@dataclass(slots=True)
class Progress:
    """What a resumed trainer needs besides weights."""

    rollouts: int = 0
    rounds: int = 0
    off: str = ""
    """Why co-training has ended; empty while it runs."""


class DrafterTrainer:
    """Trains a drafter next to a policy. Independent of trainer libraries and of the policy's algorithm.

        trainer = DrafterTrainer(drafter, policy, DrafterConfig(), sampling, seed=0)
        trainer.observe(rows)         # after a rollout, with the policy that made it
        policy(...)                   # the update: its forwards in training mode provide the states
        metrics = trainer.step()      # after each update of the policy

    No global random number is used and the policy does not change: the run is the same with and without it.

    Args:
        drafter: a small causal LM of transformers, or a head; it is trained in place and kept in evaluation mode.
        policy: the policy as it is trained (adapters included), of the same vocabulary, on the same device. Its update
            calls the decoder with one text a row; from packed rows nothing is learned.
        options: see DrafterConfig.
        sampling: of the rollouts. Only its temperature shapes the losses, as top-k and top-p make infinite log-probs.
        seed: of the run.
        processes: of the default group of torch.distributed, which begin with the same drafter. Each learns from its
            own rollouts; gradients are averaged over the tokens of all, so that the drafters stay the same.

    Raises:
        RolloutError: the two have different vocabularies, or are not causal LMs.
    """

    def __init__(
        self,
        drafter: CausalLM,
        policy: CausalLM,
        options: DrafterConfig,
        sampling: SamplingParams,
        seed: int = 0,
        processes: int = 1,
    ):
        self.options = options
        self.seed = seed
        self.processes = processes
        self._sampling = sampling
        self.drafter = drafter.eval().requires_grad_(True)
        self.policy = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
        for model in (self.drafter, self.policy):
            if not hasattr(model, "base_model") or model.get_output_embeddings() is None:
                raise RolloutError(f"{type(model).__name__} is not a causal LM of transformers; co-training needs one")
        check_vocab(*(model.get_output_embeddings().weight.shape[0] for model in (self.drafter, self.policy)))
        self._optimizer = torch.optim.AdamW(self.drafter.parameters(), options.learning_rate, weight_decay=0.0)
        self._tap = Tap(self.policy)
        self.progress = Progress()

    def observe(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Chooses the texts of a rollout of the current policy to learn from, once the update has read them.

        Args: rows: (prompt ids, response ids).
        """
        state = self.progress
        if state.off:
            return
        texts = [Text(tuple(prompt), tuple(response)) for prompt, response in rows]
        state.rollouts += 1
        tokens = min(UPDATES * TOKENS_PER_UPDATE, round(self.options.share * sum(map(len, texts))))
        generator = self._generator("choose", state.rollouts)
        self._tap.want(chosen(texts, tokens, TOKENS_PER_UPDATE, generator))

    def step(self) -> dict[str, Metric]:
        """Learns from the texts that the update has read, the only change of the drafter; returns the metrics.

        Of several processes every one must call it.
        """
        began = time.perf_counter()
        reads = self._tap.take()
        metrics: dict[str, Metric] = {}
        if not self.progress.off and self._sum(len(reads))[0]:
            metrics = self._round(reads)
        metrics["timing_s/drafter"] = seconds(time.perf_counter() - began)
        return metrics | {"drafter/active": shared(not self.progress.off)}

    def _round(self, reads: Sequence[Read]) -> dict[str, Metric]:
        """Learns once from texts, in at most UPDATES gradient steps.

        A process that has fewer texts than others takes part in every gradient step.
        """
        parts = distil.to_learn(reads, self.drafter, TOKENS_PER_UPDATE)
        self.progress.rounds += 1
        generator = self._generator("mix", self.progress.rounds)
        metrics: dict[str, Metric] = {}
        firsts: list[float] = []
        learned = 0
        with distil.whole(self.policy, self.drafter):
            while not self.progress.off:
                batch = next(parts, None)
                tokens = len(batch.targets) if batch else 0
                (all_tokens,) = self._sum(tokens)
                if not all_tokens:
                    break
                losses: list[Tensor] = []
                agreed = 0
                if batch:
                    passes = list(distil.student_logits(self.drafter, batch, generator))
                    teacher = distil.teacher_logits(self.policy, batch)
                    if not metrics:
                        agreed = self._agreeing(batch, passes[0].detach(), teacher)
                    temperature = self._sampling.temperature
                    losses = [distil.loss(logits, teacher, temperature) for logits in passes]
                    firsts.append(losses[0].item())
                    learned += tokens
                if not metrics:
                    metrics = {"drafter/agreement": shared(self._sum(agreed)[0] / all_tokens)}
                self._learn(losses, tokens / all_tokens)
        if learned:
            metrics |= {"drafter/loss": mean(sum(firsts), len(firsts)), "drafter/tokens": count(learned)}
        return metrics

    def _sum(self, *values: float) -> list[float]:
        """Each value summed over all processes."""
        total = torch.tensor(values, dtype=torch.float64, device=next(self.drafter.parameters()).device)
        if self.processes > 1:
            distributed.all_reduce(total)
        return total.tolist()

    def _learn(self, losses: Sequence[Tensor], share: float) -> None:
        """One gradient step of all processes.

        Args:
            losses: of this process's passes; none if it has no texts left.
            share: of this process in the tokens of all.
        """

        def combine(gradient: Tensor) -> Tensor:
            if self.processes == 1:
                return gradient
            total = gradient.float() * share
            distributed.all_reduce(total)
            return total.to(gradient.dtype)

        norm = distil.step(self._optimizer, torch.stack([*losses]).sum() if losses else None, combine)
        if not norm.isfinite():
            loss = losses[0].item() if losses else math.nan
            reason = f"it diverged (loss {loss:g}, gradient norm {norm.item():g}). Lower trainer.drafter.learning_rate"
            self.progress.off = reason
            self._tap.want({})
            logger.warning("Drafter co-training is off: %s", reason)

    @torch.no_grad()
    def _agreeing(self, batch: distil.Batch, student: Tensor, teacher: Tensor) -> int:
        """How many of the drafter's samples are the policy's under new noise. Args: logits [N, V] for the targets."""
        rounds = self.progress.rounds
        keys = [derive_key(self.seed, "drafter", n, rounds, "agreement") for n in range(len(batch.ids))]
        ours, theirs = (distil.keyed_samples(logits, batch, keys, self._sampling) for logits in (student, teacher))
        return int((ours == theirs).sum())

    def _generator(self, purpose: str, index: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive_key(self.seed, purpose, 0, index, "drafter"))

    def save_model(self, directory: Path) -> None:
        """Writes the drafter as a model of transformers."""
        self.drafter.save_pretrained(directory)

    def save(self, directory: Path) -> None:
        """Writes the state after a step into the directory of a checkpoint."""
        snapshot.save(directory, self._weights(), self._optimizer, asdict(self.progress))

    def load(self, directory: Path) -> None:
        """Restores what `save` wrote. Raises RolloutError if it is another drafter's; nothing changes then."""
        self.progress = Progress(**snapshot.load(directory, self._weights(), self._optimizer))

    def _weights(self) -> snapshot.Weights:
        return dict(self.drafter.named_parameters())


class TrainDrafter(TrainerCallback):
    """Trains the drafter after each update of the policy; `note` receives its metrics for the step's log."""

    def __init__(self, trainer: DrafterTrainer, note: Callable[[dict[str, Metric]], None]):
        self._trainer = trainer
        self._note = note

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._note(self._trainer.step())
