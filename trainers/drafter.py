"""Drafter co-training: a small model follows the policy it drafts for, by distillation from the policy's own rollouts.

After every rollout the drafter's agreement with the policy is measured on texts it was not trained on, against a frozen
copy of the initial drafter; then it takes a few gradient steps on the latest texts. Drafts decide only the speed of a
rollout, so nothing here can change what is sampled, and whatever goes wrong ends in co-training being switched off.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from rollout.engines.base import Sampling
from rollout.keys import derive_key
from rollout.noise import keyed_draw, process_logits
from rollout.types import EngineStats, RolloutError
from trainers import drafter_state
from trainers.config import DrafterConfig
from trainers.drafter_state import Progress
from trainers.losses import forward_kl, largest, mixed_kl, reverse_kl, total_variation, tvd
from trainers.texts import Text, batches, rejected_mask, response_logits, within

logger = logging.getLogger(__name__)

OBJECTIVES = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "mixed": mixed_kl, "tvd": tvd}
BUFFER_TOKENS = 65536  # bound of the texts learned from, prompts included; the oldest go first
MEASURE_TOKENS = 1024  # on which agreement is measured after a rollout, prompts included
DRAFT_TOKENS = 4  # draft length for which agreement is translated into passes
MAX_GRAD_NORM = 1.0
SMOOTHING = 0.8  # weight of the past in the smoothed agreement of the drafter and of the initial one
COLLAPSE = 0.3  # alarm when the smoothed agreement is this share below its best
ACCEPTED_SHARE = 0.1  # select=errors: share of the other tokens mixed in, against forgetting
KEPT = 0.4  # select=adaspec: share of tokens kept, the paper's
REFERENCE_DECAY = 0.99  # select=adaspec_ema: of the average, per gradient step


class DrafterTrainer:
    """Keeps a drafter close to a moving policy. It knows no trainer library: all algorithms use it.

        trainer = DrafterTrainer(drafter, policy, DrafterConfig(), sampling, seed=0)
        trainer.observe(rows, rejected, version, stats)  # after a rollout, with the policy that made it
        metrics = trainer.step()                         # after each update of the policy

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
        self,
        drafter: torch.nn.Module,
        policy: torch.nn.Module,
        options: DrafterConfig,
        sampling: Sampling,
        seed: int = 0,
    ):
        self.drafter = drafter.eval().requires_grad_(True)
        self.policy = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
        self.options, self.seed = options, seed
        self._law = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        _check_pair(self.drafter, self.policy)
        self._initial = copy.deepcopy(self.drafter).requires_grad_(False)
        self._average = copy.deepcopy(self._initial) if options.select == "adaspec_ema" else None
        self._optimizer = torch.optim.AdamW(self.drafter.parameters(), options.learning_rate, weight_decay=0.0)
        self._texts: list[Text] = []
        self._metrics: dict[str, float] = {}
        self._cost_s = 0.0
        self.progress = Progress()

    # A rollout ---------------------------------------------------------------------------------------------------

    def observe(
        self,
        rows: Sequence[tuple[Sequence[int], Sequence[int]]],
        rejected: Sequence[Sequence[int]],
        version: int,
        stats: EngineStats | None = None,
    ) -> None:
        """Measures agreement on a rollout of the current policy, then keeps its texts to learn from.

        Args:
            rows: (prompt ids, response ids), without failed rows.
            rejected: per row the response positions whose draft did not stand, see Completion.rejected.
            version: weight version that wrote the responses.
            stats: of the rollout; without it nothing is judged by time.

        Raises:
            RolloutError: a row has no prompt or no response.
        """
        if self.progress.off:
            return
        new = [Text(tuple(p), tuple(r), tuple(e), version) for (p, r), e in zip(rows, rejected, strict=True)]
        for i, text in enumerate(new):
            if not text.prompt or not text.response:
                raise RolloutError(
                    f"row {i} has {len(text.prompt)} prompt and {len(text.response)} response tokens; "
                    "co-training needs both. Leave out rows that failed"
                )
        self._texts = within([*self._texts, *new], self.options.versions, BUFFER_TOKENS)
        with self._charged():
            self._measure(new)
        state = self.progress
        if stats is not None and not state.off and state.agreement is not None:
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
        keys = [derive_key(self.seed, "drafter", i, state.rollouts, "agreement") for i in range(len(texts))]
        keys = torch.tensor([k for k, t in zip(keys, texts, strict=True) for _ in t.response], device=self._device)
        positions = torch.tensor([i for t in texts for i in range(len(t.response))], device=self._device)
        wanted = response_logits(self.policy, texts)
        draws = keyed_draw(wanted, keys, positions, **self._law)[0]
        found = []
        for model in (self.drafter, self._initial):
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
        self._watch()

    def _watch(self) -> None:
        """Raises an alarm once when agreement has fallen far below its best."""
        state = self.progress
        state.best = max(state.best, state.agreement)
        collapsed = state.agreement < (1 - COLLAPSE) * state.best
        if collapsed and not state.collapsed:
            logger.warning(
                "The drafter's agreement with the policy has collapsed: %.2f, at its best %.2f. Rollouts stay exact "
                "but get slower; lower trainer.drafter.learning_rate or trainer.learning_rate.",
                state.agreement,
                state.best,
            )
        state.collapsed = collapsed

    # A round of training -----------------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Trains where a round is due, the only place that changes the drafter's weights. Returns the metrics."""
        state = self.progress
        state.steps += 1
        if not state.off and self._texts and state.steps % self.options.interval == 0:
            with self._charged():
                self._train()
        metrics = self._metrics | {"timing_s/drafter": self._cost_s}
        self._judge()
        self._metrics, self._cost_s = {}, 0.0
        return metrics | {"drafter/active": float(not state.off), "drafter/collapsed": float(state.collapsed)}

    def _train(self) -> None:
        options, generator = self.options, self._generator("update", self.progress.steps)
        losses, masks = [], []
        for texts in batches(self._texts, options.updates, options.tokens_per_update, generator):
            with torch.no_grad():
                teacher = self._logits(self.policy, texts)
            student = self._logits(self.drafter, texts)
            masks.append(mask := self._select(texts, student.detach(), teacher, generator))
            if not mask.any():
                continue
            loss = OBJECTIVES[options.objective](student[mask], teacher[mask]).mean()
            self._optimizer.zero_grad()
            loss.backward()
            norm = clip_grad_norm_(self.drafter.parameters(), MAX_GRAD_NORM)
            if not (loss.isfinite() and norm.isfinite()):
                return self._diverged(f"loss {loss.item():g}, gradient norm {norm.item():g}")
            self._optimizer.step()
            if self._average is not None:
                _blend(self._average.parameters(), self.drafter.parameters(), 1 - REFERENCE_DECAY)
            losses.append(loss.item())
        if not all(p.isfinite().all() for p in self.drafter.parameters()):
            return self._diverged("its weights are NaN or infinite")
        self._metrics |= {
            "drafter/buffer_tokens": sum(map(len, self._texts)),
            "drafter/kept_ratio": torch.cat(masks).float().mean().item(),
        }
        if losses:
            self._metrics["drafter/loss"] = sum(losses) / len(losses)

    @torch.no_grad()
    def _select(self, texts: Sequence[Text], student: Tensor, teacher: Tensor, generator: torch.Generator) -> Tensor:
        """True [N] for the response tokens of a batch to learn from.

        AdaSPEC (arXiv 2510.19779) keeps those whose distance from the policy exceeds a reference's the most.
        """
        if self.options.select == "all":
            return torch.ones(len(teacher), dtype=torch.bool, device=self._device)
        if self.options.select == "errors":
            others = torch.rand(len(teacher), generator=generator) < ACCEPTED_SHARE
            return (rejected_mask(texts) | others).to(self._device)
        reference = self._logits(self._initial if self._average is None else self._average, texts)
        return largest(forward_kl(student, teacher) - forward_kl(reference, teacher), KEPT)

    def _judge(self) -> None:
        """Ends co-training when over `patience` rollouts it saved less time than it took; the better drafter stays."""
        state, patience = self.progress, self.options.patience
        if state.off or not state.window:
            return
        state.window[-1][0] += self._cost_s
        spent, saved = map(sum, zip(*state.window, strict=True))
        if len(state.window) == patience and saved < spent:
            if state.agreement < state.agreement_initial:
                _blend(self.drafter.parameters(), self._initial.parameters())
            self._stop(
                f"it does not pay: over {patience} rollouts it took {spent:.3g} s and saved an estimated {saved:.3g} s "
                f"(agreement {state.agreement:.2f}, initial drafter {state.agreement_initial:.2f})"
            )

    def _diverged(self, reason: str) -> None:
        _blend(self.drafter.parameters(), self._initial.parameters())
        self._stop(f"it diverged ({reason}); the initial drafter is back. Lower trainer.drafter.learning_rate")

    def _stop(self, reason: str) -> None:
        self.progress.off, self._texts = reason, []
        logger.warning("Drafter co-training is off: %s. Rollouts stay exact.", reason)

    @property
    def _device(self) -> torch.device:
        return next(self.drafter.parameters()).device

    def _logits(self, model: torch.nn.Module, texts: Sequence[Text]) -> Tensor:
        """Logits [N, V] float32 at the rollouts' temperature, not cut to top-k or top-p."""
        return process_logits(response_logits(model, texts), self._law["temperature"])

    def _generator(self, purpose: str, count: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive_key(self.seed, purpose, 0, count, "drafter"))

    @contextmanager
    def _charged(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._cost_s += time.perf_counter() - began

    # Checkpoints -------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Writes the state after a step into a checkpoint's directory, whose marker makes it count."""
        drafter_state.save(directory, dict(self._weights()), self._optimizer, self.progress, self._texts)

    def load(self, directory: Path) -> None:
        """Goes on from what `save` wrote.

        Raises:
            RolloutError: it is missing, damaged or another drafter's; nothing was loaded.
        """
        self.progress, self._texts = drafter_state.load(directory, dict(self._weights()), self._optimizer)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for kind, model in (("drafter", self.drafter), ("initial", self._initial), ("average", self._average)):
            if model is not None:
                yield from ((f"{kind}/{name}", p.detach()) for name, p in model.named_parameters())


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


def _check_pair(drafter: torch.nn.Module, policy: torch.nn.Module) -> None:
    sizes = []
    for model in (drafter, policy):
        if not hasattr(model, "base_model") or model.get_output_embeddings() is None:
            raise RolloutError(f"{type(model).__name__} is not a causal LM of transformers, which co-training needs")
        sizes.append(model.get_output_embeddings().weight.shape[0])
    if sizes[0] != sizes[1]:
        raise RolloutError(
            f"the drafter has a vocabulary of {sizes[0]} tokens, the policy one of {sizes[1]}: their laws cannot be "
            "compared. Use a drafter with the policy's own vocabulary"
        )
    owned = {p.data_ptr() for p in policy.parameters()}
    shared = [name for name, p in drafter.named_parameters() if p.data_ptr() in owned]
    if shared:
        raise RolloutError(
            f"the drafter shares {len(shared)} weights with the policy ({shared[0]}, ...), as rollout.drafter=layers=N "
            "does: training it would change the policy. Take a model of its own, which `python -m specrl.drafter "
            "out=DIR` makes"
        )


@torch.no_grad()
def _blend(into: Iterable[Tensor], values: Iterable[Tensor], weight: float = 1.0) -> None:
    """Moves each tensor towards its value in place; weight 1 copies, NaN included."""
    for tensor, value in zip(into, values, strict=True):
        tensor.copy_(value if weight == 1.0 else tensor.lerp(value, weight))
