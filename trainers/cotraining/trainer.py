"""Co-training: keeps a drafter close to a moving policy, at the cost of a few gradient steps.

A drafter learns from hidden states that the policy's update computes of its texts anyway, and only after its agreement
with the policy there is measured. Drafts decide only the speed of a rollout, so nothing here can change what is
sampled; whatever goes wrong ends in co-training being off.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Module
from transformers import TrainerCallback

from specrl.rollout.drafting.drafting import check_vocab
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.keys import derive_key
from specrl.rollout.reduction import Metric, count, mean, seconds, shared
from specrl.rollout.types import EngineStats, RolloutError
from specrl.trainers import snapshot
from specrl.trainers.config import DrafterConfig
from specrl.trainers.cotraining import distil
from specrl.trainers.cotraining.texts import Read, Tap, Text, batches, chosen, latest

logger = logging.getLogger(__name__)

CausalLM = Any  # a model of transformers, a peft model around one, or a head: their stubs type parts as plain Module
DRAFT_TOKENS = 4  # draft length for which agreement is translated into passes
SMOOTHING = 0.8  # weight of the past in the smoothed agreements


@dataclass(slots=True)
class Progress:
    """What a resumed trainer needs besides weights."""

    steps: int = 0
    rollouts: int = 0
    rounds: int = 0
    agreement: float | None = None
    """Smoothed keyed agreement with the policy, None before the first round."""
    agreement_initial: float | None = None
    window: list[list[float]] = field(default_factory=list)
    """[seconds spent, seconds saved] of the latest rollouts."""
    off: str = ""
    """Why co-training has ended; empty while it runs."""


class DrafterTrainer:
    """Trains a drafter next to a policy. Independent of trainer libraries and of the policy's algorithm.

        trainer = DrafterTrainer(drafter, policy, DrafterConfig(), sampling, seed=0)
        trainer.observe(rows, stats)  # after a rollout, with the policy that made it
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
        rank: of several processes that begin with the same drafter. The first one trains it on its own rollouts, the
            others take its weights after each step. None: there is one process.

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
        rank: int | None = None,
    ):
        self.options = options
        self.seed = seed
        self.rank = rank
        self._sampling = sampling
        self.drafter = drafter.eval().requires_grad_(True)
        self.policy = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
        for model in (self.drafter, self.policy):
            if not hasattr(model, "base_model") or model.get_output_embeddings() is None:
                raise RolloutError(f"{type(model).__name__} is not a causal LM of transformers; co-training needs one")
        check_vocab(*(model.get_output_embeddings().weight.shape[0] for model in (self.drafter, self.policy)))
        self.initial = copy.deepcopy(self.drafter).requires_grad_(False)
        """The drafter as it was at the start."""
        self._max_tokens = options.updates * options.tokens_per_update
        self._optimizer = torch.optim.AdamW(self.drafter.parameters(), options.learning_rate, weight_decay=0.0)
        self._tap = Tap(self.policy)
        self._reads: list[Read] = []  # what the next round learns from, oldest first; a resumed run begins with none
        self._rollout: tuple[EngineStats, int] | None = None
        self.progress = Progress()

    def observe(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], stats: EngineStats) -> None:
        """Chooses the texts of a rollout of the current policy to learn from, once the update has read them.

        Args:
            rows: (prompt ids, response ids), without failed rows.
            stats: of the rollout.
        """
        state = self.progress
        if state.off or self.rank:
            return
        texts = [Text(tuple(prompt), tuple(response)) for prompt, response in rows]
        state.rollouts += 1
        tokens = min(self._max_tokens, round(self.options.share * sum(map(len, texts))))
        generator = self._generator("choose", state.rollouts)
        self._tap.want(chosen(texts, tokens, self.options.tokens_per_update, generator))
        self._rollout = stats, sum(len(text.response) for text in texts)

    def step(self) -> dict[str, Metric]:
        """Trains if a round is due, the only place that changes the drafter's weights; returns the metrics.

        Of several processes every one must call it.
        """
        metrics = {} if self.rank else self._step()
        if self.rank is not None:
            for weight in self.drafter.parameters():
                distributed.broadcast(weight.detach(), 0)
        return metrics

    def _step(self) -> dict[str, Metric]:
        state = self.progress
        began = time.perf_counter()
        state.steps += 1
        metrics: dict[str, Metric] = {}
        if not state.off:
            self._reads = latest([*self._reads, *self._tap.take()], self._max_tokens)
            if self._reads and state.steps % self.options.interval == 0:
                metrics = self._round()
        spent_s = time.perf_counter() - began
        metrics |= {"timing_s/drafter": seconds(spent_s), **self._end_if_too_slow(spent_s)}
        return metrics | {"drafter/active": shared(not state.off)}

    def _round(self) -> dict[str, Metric]:
        """Learns once from the texts that were kept, in at most `updates` gradient steps, and drops them."""
        reads = self._reads
        self._reads = []
        self.progress.rounds += 1
        generator = self._generator("mix", self.progress.rounds)
        metrics: dict[str, Metric] = {}
        losses: list[float] = []
        tokens = 0
        for part in batches(reads, self.options.tokens_per_update):
            batch = distil.Batch.of(part, self.drafter)
            if not len(batch.targets):
                continue
            passes = distil.student_logits(self.drafter, batch, generator)
            student = next(passes)
            teacher = distil.teacher_logits(self.policy, batch)
            if not losses:
                metrics = self._measure(batch, student.detach(), teacher)
            losses.append(self._learn([student, *passes], teacher))
            tokens += len(batch.targets)
            if self.progress.off:
                return metrics
        if losses:
            metrics |= {"drafter/loss": mean(sum(losses), len(losses)), "drafter/tokens": count(tokens)}
        return metrics

    def _learn(self, passes: Sequence[Tensor], teacher: Tensor) -> float:
        """One gradient step. Args: passes: the student's logits [N, V] of each. Returns the loss of the first pass."""
        options = self.options
        losses = [distil.loss(logits, teacher, options.objective, self._sampling.temperature) for logits in passes]
        norm = distil.step(self._optimizer, torch.stack(losses).sum())
        if not norm.isfinite() or not all(p.isfinite().all() for p in self.drafter.parameters()):
            reason = (
                f"it diverged (loss {losses[0].item():g}, gradient norm {norm.item():g}); the initial drafter is back"
            )
            self._end(f"{reason}. Lower trainer.drafter.learning_rate", restore=True)
        return losses[0].item()

    @torch.no_grad()
    def _measure(self, batch: distil.Batch, student: Tensor, teacher: Tensor) -> dict[str, Metric]:
        """Agreement of both drafters with the policy under new noise. Args: logits [N, V] for the targets."""
        state = self.progress
        initial = next(distil.student_logits(self.initial, batch, torch.Generator()))
        keys = [derive_key(self.seed, "drafter", n, state.rounds, "agreement") for n in range(len(batch.ids))]
        samples = [distil.keyed_samples(logits, batch, keys, self._sampling) for logits in (teacher, student, initial)]
        agreement, agreement_initial = ((tokens == samples[0]).float().mean().item() for tokens in samples[1:])
        state.agreement = _smooth(state.agreement, agreement)
        state.agreement_initial = _smooth(state.agreement_initial, agreement_initial)
        return {"drafter/agreement": shared(agreement), "drafter/agreement_initial": shared(agreement_initial)}

    def _end_if_too_slow(self, spent_s: float) -> dict[str, Metric]:
        """Ends co-training if over `patience` rollouts it saved less time than it took; the better drafter stays.

        Returns: the estimate of what the last rollout saved, once for each rollout.
        """
        state = self.progress
        patience = self.options.patience
        metrics: dict[str, Metric] = {}
        rollout = self._rollout
        self._rollout = None
        if state.off or state.agreement is None or state.agreement_initial is None:
            return metrics
        if rollout is not None:
            saved_s = saved_seconds(*rollout, state.agreement, state.agreement_initial)
            metrics["drafter/saved_s_est"] = seconds(saved_s)
            state.window = [*state.window, [0.0, saved_s]][-patience:] if patience else []
        if not state.window:
            return metrics
        state.window[-1][0] += spent_s
        total_s = sum(spent for spent, _ in state.window)
        total_saved_s = sum(saved for _, saved in state.window)
        if len(state.window) == patience and total_saved_s < total_s:
            self._end(
                f"it does not pay: over {patience} rollouts it took {total_s:.3g} s and saved an estimated "
                f"{total_saved_s:.3g} s (agreement {state.agreement:.2f}, of the initial drafter "
                f"{state.agreement_initial:.2f})",
                restore=state.agreement < state.agreement_initial,
            )
        return metrics

    def _end(self, reason: str, restore: bool) -> None:
        if restore:
            self.drafter.load_state_dict(self.initial.state_dict())
        self.progress.off = reason
        self._reads = []
        self._tap.want({})
        logger.warning("Drafter co-training is off: %s. Rollouts stay exact.", reason)

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
        models: dict[str, Module] = {"drafter": self.drafter, "initial": self.initial}
        return {f"{kind}/{name}": p for kind, model in models.items() for name, p in model.named_parameters()}


class TrainDrafter(TrainerCallback):
    """Trains the drafter after each update of the policy; `note` receives its metrics for the step's log."""

    def __init__(self, trainer: DrafterTrainer, note: Callable[[dict[str, Metric]], None]):
        self._trainer = trainer
        self._note = note

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._note(self._trainer.step())


def saved_seconds(stats: EngineStats, tokens: int, agreement: float, initial: float) -> float:
    """Estimate of the seconds by which the initial drafter would have made a rollout of `tokens` tokens longer.

    Fewer tokens of a chain of DRAFT_TOKENS would have been accepted, by the ratio of the expected numbers; each of them
    would have cost its row another pass, at the rollout's mean seconds for the pass of a row.
    """
    now = accepted_per_pass(agreement)
    before = accepted_per_pass(initial)
    fewer = stats.sources.get("model", (0, 0))[1] * (1 - before / now) if now else 0.0
    return (stats.verify_s + stats.decode_s + stats.draft_s) * fewer / max(1, tokens - stats.accepted)


def accepted_per_pass(agreement: float) -> float:
    """Expected tokens that a chain of DRAFT_TOKENS gains, if each is accepted with this probability."""
    return sum(agreement**i for i in range(1, DRAFT_TOKENS + 1))


def _smooth(past: float | None, new: float) -> float:
    return new if past is None else SMOOTHING * past + (1 - SMOOTHING) * new
