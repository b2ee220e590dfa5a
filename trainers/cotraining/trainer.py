"""Drafter co-training: a small model follows the policy it drafts for, by distillation from the policy's own rollouts.

After every rollout the drafter's agreement with the policy is measured on texts it was not trained on, against a frozen
copy of the initial drafter; then it takes a few gradient steps on the latest texts. Drafts decide only the speed of a
rollout, so nothing here can change what is sampled, and whatever goes wrong ends in co-training being switched off.
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
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from rollout.drafting.drafting import check_vocab
from rollout.engines.base import Sampling
from rollout.keys import derive_key
from rollout.noise import keyed_draw, process_logits
from rollout.types import EngineStats, RolloutError
from trainers.config import DrafterConfig
from trainers.cotraining import state as drafter_state
from trainers.cotraining.distances import forward_kl, largest, total_variation, tvd
from trainers.cotraining.state import Progress
from trainers.cotraining.texts import Text, batches, response_logits, within

logger = logging.getLogger(__name__)

OBJECTIVES = {"forward_kl": forward_kl, "tvd": tvd}
BUFFER_TOKENS = 65536  # bound of the texts learned from, prompts included; the oldest go first
MEASURE_TOKENS = 1024  # on which agreement is measured after a rollout, prompts included
DRAFT_TOKENS = 4  # draft length for which agreement is translated into passes
MAX_GRAD_NORM = 1.0
SMOOTHING = 0.8  # weight of the past in the smoothed agreement of the drafter and of the initial one
COLLAPSE = 0.3  # alarm when the smoothed agreement is this share below its best
KEPT = 0.4  # select=adaspec: share of tokens kept, the paper's


class DrafterTrainer:
    """Keeps a drafter close to a moving policy. It knows no trainer library: all algorithms use it.

        trainer = DrafterTrainer(drafter, policy, DrafterConfig(), sampling, seed=0)
        trainer.observe(rows, version, stats)  # after a rollout, with the policy that made it
        metrics = trainer.step()               # after each update of the policy

    No global random number is used and the policy is left as it was: the run is the same with and without it.

    Args:
        drafter: a small causal LM of transformers; it is trained in place and kept in evaluation mode.
        policy: the policy as it is trained (adapters included), of the same vocabulary, on the same device.
        options: see DrafterConfig.
        sampling: the rollouts' law; only its temperature shapes the losses, as a cut law has no finite log-probs.
        seed: of the run.

    Raises:
        RolloutError: the two have other vocabularies or share weights.
    """

    def __init__(
        self, drafter: PreTrainedModel, policy: Module, options: DrafterConfig, sampling: Sampling, seed: int = 0
    ):
        self.drafter = drafter.eval().requires_grad_(True)
        self.policy = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
        self.options, self.seed = options, seed
        self._law = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        _check_pair(self.drafter, self.policy)
        self.initial = copy.deepcopy(self.drafter).requires_grad_(False)
        """The drafter as it was at the start."""
        self._optimizer = torch.optim.AdamW(self.drafter.parameters(), options.learning_rate, weight_decay=0.0)
        self.texts: list[Text] = []
        """What is learned from, oldest first."""
        self._metrics: dict[str, float] = {}
        self._cost_s = 0.0
        self.progress = Progress()

    def observe(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], version: int, stats: EngineStats) -> None:
        """Measures agreement on a rollout of the current policy, then keeps its texts to learn from.

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
        self.texts = within([*self.texts, *new], self.options.versions, BUFFER_TOKENS)
        began = time.perf_counter()
        self._measure(new)
        self._cost_s += time.perf_counter() - began
        if not state.off and state.agreement is not None:
            tokens = sum(len(text.response) for text in new)
            saved = saved_seconds(stats, tokens, state.agreement, state.agreement_initial)
            self._metrics["drafter/saved_s_est"] = saved
            state.window = [*state.window, [0.0, saved]][-self.options.patience :] if self.options.patience else []

    @torch.no_grad()
    def _measure(self, new: Sequence[Text]) -> None:
        """Agreement of both drafters with the policy at the positions of some of the texts, under fresh noise."""
        state = self.progress
        state.rollouts += 1
        texts = next(batches(new, 1, MEASURE_TOKENS, self._generator("measure", state.rollouts)))
        if not texts:
            return
        keyed = [(derive_key(self.seed, "drafter", n, state.rollouts, "agreement"), t) for n, t in enumerate(texts)]
        spots = [(key, i) for key, text in keyed for i in range(len(text.response))]
        keys, positions = torch.tensor(spots, device=self.drafter.device).unbind(1)
        wanted = response_logits(self.policy, texts)
        draws = keyed_draw(wanted, keys, positions, **self._law)[0]
        found = []
        for model in (self.drafter, self.initial):
            logits = response_logits(model, texts)
            drawn, _, _, gaps = keyed_draw(logits, keys, positions, **self._law)
            if gaps.isnan().any():
                return self._diverged("its logits are NaN or infinite")
            laws = (process_logits(z, **self._law) for z in (logits, wanted))
            found.append(((drawn == draws).float().mean().item(), 1 - total_variation(*laws).mean().item()))
        (now, overlap), (initial, _) = found
        self._metrics |= {"drafter/agreement": now, "drafter/agreement_initial": initial, "drafter/overlap": overlap}
        state.agreement = _smooth(state.agreement, now)
        state.agreement_initial = _smooth(state.agreement_initial, initial)
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

    def step(self) -> dict[str, float]:
        """Trains where a round is due, the only place that changes the drafter's weights. Returns the metrics."""
        state = self.progress
        state.steps += 1
        if not state.off and self.texts and state.steps % self.options.interval == 0:
            began = time.perf_counter()
            self._train()
            self._cost_s += time.perf_counter() - began
        metrics = self._metrics | {"timing_s/drafter": self._cost_s}
        self._judge()
        self._metrics, self._cost_s = {}, 0.0
        return metrics | {"drafter/active": float(not state.off), "drafter/collapsed": float(state.collapsed)}

    def _train(self) -> None:
        options, generator = self.options, self._generator("update", self.progress.steps)
        losses, masks = [], []
        for texts in batches(self.texts, options.updates, options.tokens_per_update, generator):
            with torch.no_grad():
                teacher = self._logits(self.policy, texts)
            student = self._logits(self.drafter, texts)
            masks.append(mask := self._select(texts, student.detach(), teacher))
            loss = OBJECTIVES[options.objective](student[mask], teacher[mask]).mean()
            self._optimizer.zero_grad()
            loss.backward()
            norm = clip_grad_norm_(self.drafter.parameters(), MAX_GRAD_NORM)
            if not (loss.isfinite() and norm.isfinite()):
                return self._diverged(f"loss {loss.item():g}, gradient norm {norm.item():g}")
            self._optimizer.step()
            losses.append(loss.item())
        if not all(p.isfinite().all() for p in self.drafter.parameters()):
            return self._diverged("its weights are NaN or infinite")
        self._metrics |= {
            "drafter/buffer_tokens": sum(map(len, self.texts)),
            "drafter/kept_ratio": torch.cat(masks).float().mean().item(),
            "drafter/loss": sum(losses) / len(losses),
        }

    @torch.no_grad()
    def _select(self, texts: Sequence[Text], student: Tensor, teacher: Tensor) -> Tensor:
        """True [N] for the response tokens of a batch to learn from.

        AdaSPEC (arXiv 2510.19779) keeps those whose distance from the policy exceeds the initial drafter's the most.
        """
        if self.options.select == "all":
            return torch.ones(len(teacher), dtype=torch.bool, device=self.drafter.device)
        reference = self._logits(self.initial, texts)
        return largest(forward_kl(student, teacher) - forward_kl(reference, teacher), KEPT)

    def _judge(self) -> None:
        """Ends co-training when over `patience` rollouts it saved less time than it took; the better drafter stays."""
        state, patience = self.progress, self.options.patience
        if state.off or not state.window:
            return
        state.window[-1][0] += self._cost_s
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
        self.progress.off, self.texts = reason, []
        logger.warning("Drafter co-training is off: %s. Rollouts stay exact.", reason)

    def _logits(self, model: Module, texts: Sequence[Text]) -> Tensor:
        """Logits [N, V] float32 at the rollouts' temperature, not cut to top-k or top-p."""
        return process_logits(response_logits(model, texts), self._law["temperature"])

    def _generator(self, purpose: str, count: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive_key(self.seed, purpose, 0, count, "drafter"))

    def save_model(self, directory: Path) -> None:
        """Writes the drafter as a model of transformers."""
        self.drafter.save_pretrained(directory)

    def save(self, directory: Path) -> None:
        """Writes the state after a step into a checkpoint's directory, whose marker makes it count."""
        drafter_state.save(directory, self._weights(), self._optimizer, self.progress, self.texts)

    def load(self, directory: Path) -> None:
        """Goes on from what `save` wrote.

        Raises:
            RolloutError: it is missing, damaged or another drafter's; nothing was loaded.
        """
        self.progress, self.texts = drafter_state.load(directory, self._weights(), self._optimizer)

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
    owned = {p.data_ptr() for p in policy.parameters()}
    shared = [name for name, p in drafter.named_parameters() if p.data_ptr() in owned]
    if shared:
        raise RolloutError(
            f"the drafter shares {len(shared)} weights with the policy ({shared[0]}, ...), as rollout.drafter=layers=N "
            "does: training it would change the policy. Take a model of its own, which `python -m specrl.drafter "
            "out=DIR` makes"
        )
