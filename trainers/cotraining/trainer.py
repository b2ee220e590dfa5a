"""Co-training: keeps a drafter close to a moving policy, at the cost of a few gradient steps.

The update computes the policy's last hidden states of its texts anyway. A drafter learns from some of these, from which
the policy's output layer makes the distributions that drafts should follow. Before the drafter learns from a text, its
agreement with the policy there is measured, and that of a frozen copy of the initial drafter. Drafts decide only the
speed of a rollout, so nothing here can change what is sampled; whatever goes wrong ends in co-training being off.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Module

from specrl.rollout.drafting.drafting import check_vocab
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.keys import derive_key
from specrl.rollout.reduction import Metric, count, mean, seconds, shared
from specrl.rollout.types import EngineStats, RolloutError
from specrl.trainers.config import DrafterConfig
from specrl.trainers.cotraining import distil
from specrl.trainers.cotraining import state as drafter_state
from specrl.trainers.cotraining.state import Progress
from specrl.trainers.cotraining.texts import Read, Tap, Text, batches, chosen, latest

logger = logging.getLogger(__name__)

CausalLM = Any  # a model of transformers, a peft model around one, or a head: their stubs type parts as plain Module
DRAFT_TOKENS = 4  # draft length for which agreement is translated into passes
SMOOTHING = 0.8  # weight of the past in the smoothed agreements
COLLAPSE = 0.3  # warn when the smoothed agreement is this share below its best


class DrafterTrainer:
    """Trains a drafter next to a policy. Independent of trainer libraries and of the policy's algorithm.

        trainer = DrafterTrainer(drafter, policy, DrafterConfig(), sampling, seed=0)
        trainer.observe(rows, version, stats)  # after a rollout, with the policy that made it
        policy(...)                            # the update: its forwards in training mode provide the states
        metrics = trainer.step()               # after each update of the policy

    No global random number is used and the policy does not change: the run is the same with and without it.

    Args:
        drafter: a small causal LM of transformers, or a head; it is trained in place and kept in evaluation mode.
        policy: the policy as it is trained (adapters included), of the same vocabulary, on the same device.
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
        self._tapped = True  # whether the update has read one of the chosen texts
        self._warned = False  # that it reads none
        self.reads: list[Read] = []
        """What the next round learns from, oldest first."""
        self._rollout: tuple[EngineStats, int] | None = None
        self._metrics: dict[str, Metric] = {}
        self.progress = Progress()

    def observe(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], version: int, stats: EngineStats) -> None:
        """Chooses the texts of a rollout of the current policy to learn from, once the update has read them.

        Args:
            rows: (prompt ids, response ids), without failed rows.
            version: weight version that wrote the responses.
            stats: of the rollout.

        Raises:
            RolloutError: a row has no prompt or no response.
        """
        state = self.progress
        if state.off or self.rank:
            return
        texts = [Text(tuple(prompt), tuple(response), version) for prompt, response in rows]
        for i, text in enumerate(texts):
            if not text.prompt or not text.response:
                raise RolloutError(
                    f"row {i} has {len(text.prompt)} prompt and {len(text.response)} response tokens; "
                    "co-training needs both. Leave out rows that failed"
                )
        if self._tap.forwards and not self._tapped:
            self._warn_untapped(f"none of its {self._tap.forwards} forwards had one of the chosen texts in its own row")
        state.rollouts += 1
        tokens = min(self._max_tokens, round(self.options.share * sum(map(len, texts))))
        wanted = chosen(texts, tokens, self.options.tokens_per_update, self._generator("choose", state.rollouts))
        self._tap.want(wanted)
        self._tapped = not wanted
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
        if not state.off:
            self._take_reads()
            if self.reads and state.steps % self.options.interval == 0:
                self._round()
        metrics = self._metrics | {"timing_s/drafter": seconds(time.perf_counter() - began)}
        self._end_if_too_slow(metrics)
        self._metrics = {}
        return metrics | {"drafter/active": shared(not state.off), "drafter/collapsed": shared(state.collapsed)}

    def _take_reads(self) -> None:
        """Takes what the update has computed since the last step."""
        reads = self._tap.take()
        self._tapped |= bool(reads)
        if self._tap.missing and not self._tap.forwards and not self._tapped:
            self._warn_untapped("it called no forward of the decoder in training mode")
        self.reads = latest([*self.reads, *reads], self._max_tokens)

    def _round(self) -> None:
        """Learns once from the texts that were kept, in at most `updates` gradient steps, and drops them."""
        reads = self.reads
        self.reads = []
        self.progress.rounds += 1
        generator = self._generator("mix", self.progress.rounds)
        losses: list[float] = []
        tokens = 0
        for part in batches(reads, self.options.tokens_per_update):
            batch = distil.Batch.of(part, self.drafter)
            if len(batch.targets) and not self.progress.off:
                losses.append(self._learn(batch, generator, measure=not losses))
                tokens += len(batch.targets)
        if losses and not self.progress.off:
            self._metrics |= {"drafter/loss": mean(sum(losses), len(losses)), "drafter/tokens": count(tokens)}

    def _learn(self, batch: distil.Batch, generator: torch.Generator, measure: bool) -> float:
        """One gradient step; its first pass also measures the agreement before it. Returns that pass's loss."""
        passes = distil.student_logits(self.drafter, batch, generator)
        student = next(passes)
        teacher = distil.teacher_logits(self.policy, batch)
        if measure:
            self._measure(batch, student.detach(), teacher)
        losses = [
            distil.loss(logits, teacher, self.options.objective, self._sampling.temperature)
            for logits in (student, *passes)
        ]
        norm = distil.step(self._optimizer, torch.stack(losses).sum())
        if not norm.isfinite() or not all(p.isfinite().all() for p in self.drafter.parameters()):
            reason = (
                f"it diverged (loss {losses[0].item():g}, gradient norm {norm.item():g}); the initial drafter is back"
            )
            self._end(f"{reason}. Lower trainer.drafter.learning_rate", restore=True)
        return losses[0].item()

    @torch.no_grad()
    def _measure(self, batch: distil.Batch, student: Tensor, teacher: Tensor) -> None:
        """Agreement of both drafters with the policy under new noise. Args: logits [N, V] for the targets."""
        state = self.progress
        initial = next(distil.student_logits(self.initial, batch, torch.Generator()))
        keys = [derive_key(self.seed, "drafter", n, state.rounds, "agreement") for n in range(len(batch.ids))]
        samples = [distil.keyed_samples(logits, batch, keys, self._sampling) for logits in (teacher, student, initial)]
        agreement, agreement_initial = ((tokens == samples[0]).float().mean().item() for tokens in samples[1:])
        self._metrics |= {
            "drafter/agreement": shared(agreement),
            "drafter/agreement_initial": shared(agreement_initial),
            "drafter/overlap": shared(distil.overlap(student, teacher, self._sampling)),
        }
        state.agreement = _smooth(state.agreement, agreement)
        state.agreement_initial = _smooth(state.agreement_initial, agreement_initial)
        state.best = max(state.best, state.agreement)
        collapsed = state.agreement < (1 - COLLAPSE) * state.best
        if collapsed and not state.collapsed:
            logger.warning(
                f"The drafter's agreement with the policy has collapsed: {state.agreement:.2f}, at its best "
                f"{state.best:.2f}. Rollouts stay exact but get slower; lower trainer.drafter.learning_rate or "
                "trainer.learning_rate."
            )
        state.collapsed = collapsed

    def _end_if_too_slow(self, metrics: dict[str, Metric]) -> None:
        """Ends co-training if over `patience` rollouts it saved less time than it took; the better drafter stays."""
        state = self.progress
        patience = self.options.patience
        if state.off or state.agreement is None or state.agreement_initial is None:
            self._rollout = None
            return
        if self._rollout is not None:
            stats, tokens = self._rollout
            saved_s = saved_seconds(stats, tokens, state.agreement, state.agreement_initial)
            metrics["drafter/saved_s_est"] = seconds(saved_s)
            state.window = [*state.window, [0.0, saved_s]][-patience:] if patience else []
        self._rollout = None
        if not state.window:
            return
        state.window[-1][0] += float(metrics["timing_s/drafter"])
        spent_s = sum(spent for spent, _ in state.window)
        saved_s = sum(saved for _, saved in state.window)
        if len(state.window) == patience and saved_s < spent_s:
            self._end(
                f"it does not pay: over {patience} rollouts it took {spent_s:.3g} s and saved an estimated "
                f"{saved_s:.3g} s (agreement {state.agreement:.2f}, initial drafter {state.agreement_initial:.2f})",
                restore=state.agreement < state.agreement_initial,
            )

    def _end(self, reason: str, restore: bool) -> None:
        if restore:
            self.drafter.load_state_dict(self.initial.state_dict())
        self.progress.off = reason
        self.reads = []
        self._tap.want({})
        logger.warning("Drafter co-training is off: %s. Rollouts stay exact.", reason)

    def _warn_untapped(self, reason: str) -> None:
        """Warns once that the update provides nothing to learn from."""
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "Drafter co-training learns nothing: it takes the policy's hidden states from the update's own forward, "
            f"and in the update after rollout {self.progress.rollouts} {reason}. It needs an update that calls "
            f"{type(self.policy.base_model).__name__} with one text a row, padded or not. Rollouts stay exact; set "
            "trainer.drafter.train=false."
        )

    def _generator(self, purpose: str, index: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive_key(self.seed, purpose, 0, index, "drafter"))

    def save_model(self, directory: Path) -> None:
        """Writes the drafter as a model of transformers."""
        self.drafter.save_pretrained(directory)

    def save(self, directory: Path) -> None:
        """Writes the state after a step into the directory of a checkpoint."""
        drafter_state.save(directory, self._weights(), self._optimizer, self.progress, self.reads)

    def load(self, directory: Path) -> None:
        """Restores what `save` wrote. RolloutError if it is missing, damaged or another drafter's; nothing changes."""
        self.progress, self.reads = drafter_state.load(directory, self._weights(), self._optimizer)

    def _weights(self) -> dict[str, Tensor]:
        models: dict[str, Module] = {"drafter": self.drafter, "initial": self.initial}
        return {f"{kind}/{name}": p.detach() for kind, model in models.items() for name, p in model.named_parameters()}


def saved_seconds(stats: EngineStats, tokens: int, agreement: float, initial: float) -> float:
    """Estimate of the seconds by which the initial drafter would have made a rollout of `tokens` tokens longer.

    Fewer tokens of a chain of DRAFT_TOKENS would have been accepted, by the ratio of the expected numbers; each of them
    would have cost its row another pass, at the rollout's mean seconds for the pass of a row.
    """
    now = tokens_per_pass(agreement, DRAFT_TOKENS) - 1
    before = tokens_per_pass(initial, DRAFT_TOKENS) - 1
    fewer = stats.sources.get("model", (0, 0))[1] * (1 - before / now) if now else 0.0
    return (stats.verify_s + stats.decode_s + stats.draft_s) * fewer / max(1, tokens - stats.accepted)


def tokens_per_pass(agreement: float, draft_tokens: int) -> float:
    """Expected tokens of a pass, including the free one, if each draft token is accepted with this probability."""
    return sum(agreement**i for i in range(draft_tokens + 1))  # (1 - a^(k+1)) / (1 - a), also at a = 1


def _smooth(past: float | None, new: float) -> float:
    return new if past is None else SMOOTHING * past + (1 - SMOOTHING) * new
