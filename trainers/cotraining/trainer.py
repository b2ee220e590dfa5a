"""Drafter co-training: a drafter follows the policy it drafts for, by distillation from the policy's own rollouts.

It learns from what the update computes anyway: the last hidden states of some of the texts, of which the policy's
output layer makes the laws that drafts should follow. Before it learns from a text, its agreement with the policy there
is measured, against a frozen copy of the initial drafter. Drafts decide only the speed of a rollout, so nothing here
can change what is sampled, and whatever goes wrong ends in co-training being switched off.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from specrl.rollout.drafting.drafting import check_vocab
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.keys import derive_key
from specrl.rollout.noise import keyed_draw, process_logits
from specrl.rollout.reduction import Metric, count, mean, seconds, shared
from specrl.rollout.types import EngineStats, RolloutError
from specrl.trainers.config import DrafterConfig
from specrl.trainers.cotraining import distil
from specrl.trainers.cotraining import state as drafter_state
from specrl.trainers.cotraining.distances import total_variation
from specrl.trainers.cotraining.state import Progress
from specrl.trainers.cotraining.tap import Tap
from specrl.trainers.cotraining.texts import Read, Text, batches, chosen, within

logger = logging.getLogger(__name__)

DRAFT_TOKENS = 4  # draft length for which agreement is translated into passes
SMOOTHING = 0.8  # weight of the past in the smoothed agreement of the drafter and of the initial one
COLLAPSE = 0.3  # alarm when the smoothed agreement is this share below its best


class DrafterTrainer:
    """Keeps a drafter close to a moving policy. It knows no trainer library: all algorithms use it.

        trainer = DrafterTrainer(drafter, policy, DrafterConfig(), sampling, seed=0)
        trainer.observe(rows, version, stats)  # after a rollout, with the policy that made it
        policy(...)                            # the update: forwards in training mode, which it listens to
        metrics = trainer.step()               # after each update of the policy

    No global random number is used and the policy is left as it was: the run is the same with and without it.

    Args:
        drafter: a small causal LM of transformers, or a head; it is trained in place and kept in evaluation mode.
        policy: the policy as it is trained (adapters included), of the same vocabulary, on the same device.
        options: see DrafterConfig.
        sampling: the rollouts' law; only its temperature shapes the losses, as a cut law has no finite log-probs.
        seed: of the run.

    Raises:
        RolloutError: the two have other vocabularies or share weights.
    """

    def __init__(
        self, drafter: PreTrainedModel, policy: Module, options: DrafterConfig, sampling: SamplingParams, seed: int = 0
    ):
        self.drafter = drafter.eval().requires_grad_(True)
        self.policy = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
        self.options, self.seed = options, seed
        self._law = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        _check_pair(self.drafter, self.policy)
        self.initial = copy.deepcopy(self.drafter).requires_grad_(False)
        """The drafter as it was at the start."""
        self._bound = options.updates * options.tokens_per_update
        self._optimizer = torch.optim.AdamW(self.drafter.parameters(), options.learning_rate, weight_decay=0.0)
        self._tap, self._heard, self._told = Tap(self.policy), True, False
        self.reads: list[Read] = []
        """What the next round learns from, oldest first."""
        self._stats: tuple[EngineStats, int] | None = None
        self._metrics: dict[str, Metric] = {}
        self.progress = Progress()

    def observe(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], version: int, stats: EngineStats) -> None:
        """Chooses what of a rollout of the current policy is learned from, once the update has read it.

        Args:
            rows: (prompt ids, response ids), without failed rows.
            version: weight version that wrote the responses.
            stats: of the rollout.

        Raises:
            RolloutError: a row has no prompt or no response.
        """
        state = self.progress
        if state.off:
            return
        new = [Text(tuple(prompt), tuple(response), version) for prompt, response in rows]
        for i, text in enumerate(new):
            if not text.prompt or not text.response:
                raise RolloutError(
                    f"row {i} has {len(text.prompt)} prompt and {len(text.response)} response tokens; "
                    "co-training needs both. Leave out rows that failed"
                )
        if self._tap.forwards and not self._heard:
            self._tell_deaf(f"none of its {self._tap.forwards} forwards had one of the chosen rows by itself")
        state.rollouts += 1
        tokens = min(self._bound, round(self.options.share * sum(map(len, new))))
        wanted = chosen(new, tokens, self.options.tokens_per_update, self._generator("choose", state.rollouts))
        self._tap.want(wanted)
        self._heard = not wanted
        self._stats = stats, sum(len(text.response) for text in new)

    def step(self) -> dict[str, Metric]:
        """Trains where a round is due, the only place that changes the drafter's weights. Returns the metrics."""
        state, began = self.progress, time.perf_counter()
        state.steps += 1
        if not state.off:
            self._listen()
            if self.reads and state.steps % self.options.interval == 0:
                self._round()
        metrics = self._metrics | {"timing_s/drafter": seconds(time.perf_counter() - began)}
        self._judge(metrics)
        self._metrics = {}
        return metrics | {"drafter/active": shared(not state.off), "drafter/collapsed": shared(state.collapsed)}

    def _listen(self) -> None:
        """Takes what the update has computed since the last step."""
        new = self._tap.take()
        self._heard |= bool(new)
        if self._tap.waits and not self._tap.forwards and not self._heard:
            self._tell_deaf("it called no forward of the decoder in training mode")
        self.reads = within([*self.reads, *new], self._bound)

    def _round(self) -> None:
        """Learns once from the texts that were kept, in at most `updates` gradient steps, and forgets them."""
        reads, self.reads, self.progress.rounds = self.reads, [], self.progress.rounds + 1
        losses, places, mix = [], 0, self._generator("mix", self.progress.rounds)
        for part in batches(reads, self.options.tokens_per_update):
            batch = distil.Batch.of(part, self.drafter)
            if len(batch.places) and not self.progress.off:
                losses.append(self._learn(batch, mix, measured=not losses))
                places += len(batch.places)
        if losses and not self.progress.off:
            self._metrics |= {"drafter/loss": mean(sum(losses), len(losses)), "drafter/tokens": count(places)}

    def _learn(self, batch: distil.Batch, mix: torch.Generator, measured: bool) -> float:
        """One gradient step, by whose first pass the agreement before it is measured; returns that pass's loss."""
        options, heat = self.options, self._law["temperature"]
        passes = distil.guesses(self.drafter, batch, mix)
        student, teacher = next(passes), distil.taught(self.policy, batch)
        if measured:
            self._measure(batch, student.detach(), teacher)
        losses = [distil.loss(z, teacher, options.objective, heat) for z in (student, *passes)]
        norm = distil.step(self._optimizer, sum(losses))
        if not norm.isfinite() or not all(p.isfinite().all() for p in self.drafter.parameters()):
            self._diverged(f"loss {losses[0].item():g}, gradient norm {norm.item():g}")
        return losses[0].item()

    @torch.no_grad()
    def _measure(self, batch: distil.Batch, student: Tensor, teacher: Tensor) -> None:
        """Agreement of both drafters with the policy under fresh noise. Args: logits [N, V] at the spots."""
        state, law = self.progress, self._law
        initial = next(distil.guesses(self.initial, batch, torch.Generator()))
        texts, positions = batch.places.unbind(1)
        keys = [derive_key(self.seed, "drafter", n, state.rounds, "agreement") for n in range(len(batch.ids))]
        noise = torch.tensor(keys, device=texts.device)[texts], positions
        wanted, drawn, before = (keyed_draw(z, *noise, **law)[0] for z in (teacher, student, initial))
        now, before = ((found == wanted).float().mean().item() for found in (drawn, before))
        overlap = 1 - total_variation(*(process_logits(z, **law) for z in (student, teacher))).mean().item()
        found = {"drafter/agreement": now, "drafter/agreement_initial": before, "drafter/overlap": overlap}
        self._metrics |= {name: shared(value) for name, value in found.items()}
        state.agreement = _smooth(state.agreement, now)
        state.agreement_initial = _smooth(state.agreement_initial, before)
        self._watch(state)

    def _watch(self, state: Progress) -> None:
        """Raises an alarm once when agreement has fallen far below its best."""
        state.best = max(state.best, state.agreement)
        collapsed = state.agreement < (1 - COLLAPSE) * state.best
        if collapsed and not state.collapsed:
            logger.warning(
                f"The drafter's agreement with the policy has collapsed: {state.agreement:.2f}, at its best "
                f"{state.best:.2f}. Rollouts stay exact but get slower; lower trainer.drafter.learning_rate or "
                "trainer.learning_rate."
            )
        state.collapsed = collapsed

    def _judge(self, metrics: dict[str, Metric]) -> None:
        """Ends co-training when over `patience` rollouts it saved less time than it took; the better drafter stays."""
        state, patience = self.progress, self.options.patience
        if state.off:
            return
        if self._stats and state.agreement is not None:
            saved_s = saved_seconds(*self._stats, state.agreement, state.agreement_initial)
            metrics["drafter/saved_s_est"] = seconds(saved_s)
            state.window = [*state.window, [0.0, saved_s]][-patience:] if patience else []
        self._stats = None
        if not state.window:
            return
        state.window[-1][0] += float(metrics["timing_s/drafter"])
        spent, saved = map(sum, zip(*state.window, strict=True))
        if len(state.window) == patience and saved < spent:
            self._end(
                f"it does not pay: over {patience} rollouts it took {spent:.3g} s and saved an estimated {saved:.3g} s "
                f"(agreement {state.agreement:.2f}, initial drafter {state.agreement_initial:.2f})",
                restore=state.agreement < state.agreement_initial,
            )

    def _diverged(self, reason: str) -> None:
        reason = f"it diverged ({reason}); the initial drafter is back. Lower trainer.drafter.learning_rate"
        self._end(reason, restore=True)

    def _end(self, reason: str, restore: bool) -> None:
        if restore:
            self.drafter.load_state_dict(self.initial.state_dict())
        self.progress.off, self.reads = reason, []
        self._tap.want({})
        logger.warning("Drafter co-training is off: %s. Rollouts stay exact.", reason)

    def _tell_deaf(self, reason: str) -> None:
        """Says once that the update gives nothing to learn from."""
        if not self._told:
            logger.warning(
                "Drafter co-training learns nothing: it takes the policy's hidden states from the update's own "
                "forward, and of the update behind rollout %d %s. It needs an update that calls %s with one text a "
                "row, padded or not. Rollouts stay exact; set trainer.drafter.train=false.",
                self.progress.rollouts,
                reason,
                type(self.policy.base_model).__name__,
            )
        self._told = True

    def _generator(self, purpose: str, count: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive_key(self.seed, purpose, 0, count, "drafter"))

    def save_model(self, directory: Path) -> None:
        """Writes the drafter as a model of transformers."""
        self.drafter.save_pretrained(directory)

    def save(self, directory: Path) -> None:
        """Writes the state after a step into a checkpoint's directory, whose marker makes it count."""
        drafter_state.save(directory, self._weights(), self._optimizer, self.progress, self.reads)

    def load(self, directory: Path) -> None:
        """Goes on from what `save` wrote.

        Raises:
            RolloutError: it is missing, damaged or another drafter's; nothing was loaded.
        """
        self.progress, self.reads = drafter_state.load(directory, self._weights(), self._optimizer)

    def _weights(self) -> dict[str, Tensor]:
        pair = {"drafter": self.drafter, "initial": self.initial}
        return {f"{kind}/{name}": p.detach() for kind, model in pair.items() for name, p in model.named_parameters()}


def saved_seconds(stats: EngineStats, tokens: int, agreement: float, initial: float) -> float:
    """Estimate of the seconds by which the initial drafter would have made a rollout of `tokens` tokens longer.

    Of a chain of DRAFT_TOKENS fewer tokens would have stood, by the ratio of the expected numbers; each would have cost
    its row another pass, at the rollout's mean seconds for the pass of a row.
    """
    now, before = (tokens_per_pass(a, DRAFT_TOKENS) - 1 for a in (agreement, initial))
    fewer = stats.sources.get("model", (0, 0))[1] * (1 - before / now) if now else 0.0
    return (stats.verify_s + stats.decode_s + stats.draft_s) * fewer / max(1, tokens - stats.accepted)


def tokens_per_pass(agreement: float, draft_tokens: int) -> float:
    """Expected tokens of a pass, its free one included, whose draft tokens are each accepted with that probability."""
    return sum(agreement**i for i in range(draft_tokens + 1))  # (1 - a^(k+1)) / (1 - a), also at a = 1


def _smooth(past: float | None, new: float) -> float:
    return new if past is None else SMOOTHING * past + (1 - SMOOTHING) * new


def _check_pair(drafter: Module, policy: Module) -> None:
    for model in (drafter, policy):
        if not hasattr(model, "base_model") or model.get_output_embeddings() is None:
            raise RolloutError(f"{type(model).__name__} is not a causal LM of transformers, which co-training needs")
    check_vocab(*(model.get_output_embeddings().weight.shape[0] for model in (drafter, policy)))
