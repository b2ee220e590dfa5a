"""Drafter co-training: a small model follows the policy it drafts for, by distillation from the policy's own rollouts.

After every rollout the drafter's agreement with the policy is measured on texts it was not trained on, against a frozen
copy of the initial drafter; then it takes a few gradient steps on the latest texts. Drafts decide only the speed of a
rollout, so nothing here can change what is sampled, and whatever goes wrong ends in co-training being switched off.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

from rollout.config import doc
from rollout.engines.base import Sampling
from rollout.noise import derive_key, keyed_draw, process_logits
from rollout.types import EngineStats, RolloutError
from trainers.losses import forward_kl, largest, mixed_kl, reverse_kl, total_variation, tvd

logger = logging.getLogger(__name__)

LOSSES = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "mixed": mixed_kl, "tvd": tvd}
WEIGHTS, STATE = "drafter.safetensors", "drafter.json"
MAX_GRAD_NORM = 1.0
SMOOTHING = 0.8  # weight of the past in the smoothed agreement of the drafter and of the initial one
REFERENCE_DECAY = 0.99  # of reference=ema, per gradient step


@dataclass
class DrafterConfig:
    loss: Literal["forward_kl", "reverse_kl", "mixed", "tvd"] = doc("tvd", "distance from the policy's law")
    select: Literal["all", "errors", "adaspec"] = doc(
        "all", "response tokens to learn from; errors: rejected drafts; adaspec: the most behind the reference"
    )
    accepted_share: float = doc(0.1, "select=errors: share of the other tokens mixed in, against forgetting")
    keep: float = doc(0.4, "select=adaspec: share of tokens kept")
    reference: Literal["initial", "ema"] = doc("initial", "select=adaspec: the initial drafter or an average of it")
    learning_rate: float = doc(1e-4, "AdamW learning rate")
    every: int = doc(1, "trainer steps between two rounds of training")
    updates: int = doc(4, "gradient steps in one round")
    tokens_per_update: int = doc(
        1024, "tokens of a gradient step, prompts included; the policy's logits of a whole round are held"
    )
    versions: int = doc(2, "policy versions whose texts are learned from, the latest included")
    buffer_tokens: int = doc(65536, "bound of these texts, prompts included; the oldest go first")
    measure_tokens: int = doc(1024, "tokens on which agreement is measured after a rollout, prompts included")
    draft_tokens: int = doc(4, "draft length for which agreement is translated into saved passes")
    patience: int = doc(20, "rollouts over which co-training must save more time than it takes; 0 never judges")
    collapse: float = doc(0.3, "alarm when agreement is this share below its best")


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the policy's response to it. `len` counts both."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    errors: tuple[int, ...]
    """Response positions t whose draft was rejected: the logits *before* response token t were wrong."""
    version: int
    """Weight version of the policy that wrote it."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(slots=True)
class Progress:
    """What a resumed trainer knows besides weights and texts."""

    steps: int = 0
    rollouts: int = 0
    agreement: float | None = None
    """Smoothed keyed agreement with the policy, None before the first rollout."""
    agreement_initial: float | None = None
    best: float = 0.0
    collapsed: bool = False
    cost_s: float = 0.0
    """Seconds since the last judged rollout."""
    decode_s: float = 0.0
    """Seconds of the passes of the rollouts since then."""
    window: list[tuple[float, float]] = field(default_factory=list)
    """(seconds spent, seconds saved) of the latest judged rounds."""
    off: str = ""
    """Why co-training has ended; empty while it runs."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Measured since the last step."""


class DrafterTrainer:
    """Keeps a drafter close to a moving policy.

        trainer = DrafterTrainer(drafter, policy, DrafterConfig(), sampling, seed=0)
        trainer.observe(rows, errors, version, stats)  # after a rollout, with the policy that made it
        metrics = trainer.step()                       # before the next rollout; the drafter's KV is then stale

    No global random number is used and the policy is left as it was: the run is the same with and without it.

    Args:
        drafter: a small causal LM of transformers; it is trained in place and kept in evaluation mode.
        policy: the policy as it is trained (adapters included), of the same vocabulary.
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
        sampling: Sampling | None = None,
        seed: int = 0,
    ):
        self.drafter = drafter.eval().requires_grad_(True)
        self.policy = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
        self.options, self.seed = options, seed
        sampling = sampling or Sampling(frozenset())
        self._law = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        _check_pair(self.drafter, self.policy)
        self._initial = copy.deepcopy(self.drafter).requires_grad_(False)
        self._average = copy.deepcopy(self._initial) if options.reference == "ema" else None
        self._good = [p.detach().clone() for p in self.drafter.parameters()]
        self._optimizer = torch.optim.AdamW(self.drafter.parameters(), options.learning_rate, weight_decay=0.0)
        self._texts: list[Text] = []
        self.progress = Progress()

    # A rollout ---------------------------------------------------------------------------------------------------

    def observe(
        self,
        rows: Sequence[tuple[Sequence[int], Sequence[int]]],
        errors: Sequence[Sequence[int]],
        version: int,
        stats: EngineStats | None = None,
    ) -> None:
        """Measures agreement on a rollout of the current policy, then keeps its texts to learn from.

        Args:
            rows: (prompt ids, response ids), without failed rows.
            errors: per row the response positions whose draft was rejected; empty when unknown.
            version: weight version that wrote the responses.
            stats: of the rollout; without it nothing is judged by time.

        Raises:
            RolloutError: a row has no prompt or response, an error lies outside its response, or the policy is broken.
        """
        if self.progress.off:
            return
        new = [Text(tuple(p), tuple(r), tuple(e), version) for (p, r), e in zip(rows, errors, strict=True)]
        for i, text in enumerate(new):
            if not text.prompt or not text.response:
                raise RolloutError(f"row {i} has {len(text.prompt)} prompt and {len(text.response)} response tokens; "
                                   "co-training needs both. Leave out rows that failed")  # fmt: skip
            if outside := [t for t in text.errors if not 0 <= t < len(text.response)]:
                raise RolloutError(f"row {i} names a rejected draft at {outside[0]}, outside its {len(text.response)} "
                                   "response tokens; positions count from the first of them")  # fmt: skip
        self._texts = within([*self._texts, *new], self.options.versions, self.options.buffer_tokens)
        if stats is not None:
            self.progress.decode_s += stats.verify_s + stats.decode_s + stats.draft_s
        with self._charged():
            self._measure(new)

    @torch.no_grad()
    def _measure(self, new: Sequence[Text]) -> None:
        """Agreement of both drafters with the policy at the positions of some of the texts, under fresh noise."""
        state, options = self.progress, self.options
        state.rollouts += 1
        texts = next(batches(new, 1, options.measure_tokens, self._generator("measure", state.rollouts)))
        if not texts:
            return
        keys = [derive_key(self.seed, "drafter", i, state.rollouts, "agreement") for i in range(len(texts))]
        keys = torch.tensor([k for k, t in zip(keys, texts, strict=True) for _ in t.response], device=self._device)
        positions = torch.tensor([i for t in texts for i in range(len(t.response))], device=self._device)
        wanted = response_logits(self.policy, texts).to(self._device)
        draws, _, _, gaps = keyed_draw(wanted, keys, positions, **self._law)
        if gaps.isnan().any():
            raise RolloutError("the policy returned NaN or infinite logits; check its learning rate and last update")
        found = []
        for model in (self.drafter, self._initial):
            logits = response_logits(model, texts)
            drawn, _, _, gaps = keyed_draw(logits, keys, positions, **self._law)
            if gaps.isnan().any():
                return self._diverged("its logits are NaN or infinite")
            laws = (process_logits(z, **self._law) for z in (logits, wanted))
            found += [(drawn == draws).float().mean().item(), 1 - total_variation(*laws).mean().item()]
        names = ("drafter/agreement", "drafter/overlap", "drafter/agreement_initial", "drafter/overlap_initial")
        state.metrics |= dict(zip(names, found, strict=True))
        state.agreement = _smooth(state.agreement, found[0])
        state.agreement_initial = _smooth(state.agreement_initial, found[2])
        self._watch()

    def _watch(self) -> None:
        """Raises an alarm once when agreement has fallen far below its best."""
        state = self.progress
        state.best = max(state.best, state.agreement)
        collapsed = state.agreement < (1 - self.options.collapse) * state.best
        if collapsed and not state.collapsed:
            logger.warning(
                "The drafter's agreement with the policy has collapsed: %.2f, at its best %.2f. Rollouts stay exact "
                "but get slower; lower the drafter's learning rate or the policy's.",
                state.agreement,
                state.best,
            )
        state.collapsed = collapsed

    # A round of training -----------------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Trains where a round is due, the only place that changes the drafter's weights. Returns the metrics."""
        state = self.progress
        if not state.off:
            state.steps += 1
            if state.steps % self.options.every == 0 and self._texts:
                with self._charged():
                    self._train()
            self._judge()
        metrics, state.metrics = state.metrics, {}
        return metrics | {"drafter/active": float(not state.off), "drafter/collapsed": float(state.collapsed)}

    def _train(self) -> None:
        state, options = self.progress, self.options
        generator = self._generator("update", state.steps)
        rounds = list(batches(self._texts, options.updates, options.tokens_per_update, generator))
        began = time.perf_counter()
        teachers = [self._teach(texts) for texts in rounds]
        teacher_s = time.perf_counter() - began
        masks = self._select(rounds, teachers, generator)
        losses, norms = [], []
        for texts, teacher, mask in zip(rounds, teachers, masks, strict=True):
            if not mask.any():
                continue
            loss = LOSSES[options.loss](self._logits(self.drafter, texts)[mask], teacher[mask]).mean()
            self._optimizer.zero_grad()
            loss.backward()
            norm = clip_grad_norm_(self.drafter.parameters(), MAX_GRAD_NORM)
            if not (loss.isfinite() and norm.isfinite()):
                return self._diverged(f"loss {loss.item():g}, gradient norm {norm.item():g}")
            self._optimizer.step()
            if self._average is not None:
                _blend(self._average.parameters(), self.drafter.parameters(), 1 - REFERENCE_DECAY)
            losses.append(loss.item())
            norms.append(norm.item())
        if not all(p.isfinite().all() for p in self.drafter.parameters()):
            return self._diverged("its weights are NaN or infinite")
        _blend(self._good, self.drafter.parameters())
        state.metrics |= {
            "timing_s/drafter_teacher": teacher_s,
            "drafter/buffer_tokens": sum(map(len, self._texts)),
            "drafter/kept_ratio": sum(m.sum().item() for m in masks) / sum(map(len, masks)),
        }
        if losses:
            state.metrics |= {"drafter/loss": sum(losses) / len(losses), "drafter/grad_norm": max(norms)}

    @torch.no_grad()
    def _teach(self, texts: Sequence[Text]) -> Tensor:
        logits = self._logits(self.policy, texts).to(self._device)
        if logits.device.type == "cuda":
            torch.cuda.synchronize(logits.device)  # so that its seconds are its own
        return logits

    @torch.no_grad()
    def _select(self, rounds: list[list[Text]], teachers: list[Tensor], generator: torch.Generator) -> list[Tensor]:
        """True [N] per batch for the response tokens to learn from; the quantile of adaspec is over all batches."""
        options, sizes = self.options, [len(teacher) for teacher in teachers]
        if options.select == "errors":
            masks = [rejected(texts) | (torch.rand(n, generator=generator) < options.accepted_share)
                     for texts, n in zip(rounds, sizes, strict=True)]  # fmt: skip
        elif options.select == "adaspec":
            reference = self._initial if self._average is None else self._average
            behind = [forward_kl(self._logits(self.drafter, texts), teacher)
                      - forward_kl(self._logits(reference, texts), teacher)
                      for texts, teacher in zip(rounds, teachers, strict=True)]  # fmt: skip
            masks = largest(torch.cat(behind), options.keep).split(sizes)
        else:
            masks = [torch.ones(n, dtype=torch.bool) for n in sizes]
        return [mask.to(self._device) for mask in masks]

    def _judge(self) -> None:
        """Charges the step, estimates what co-training saves, and ends it when that is less over `patience` rounds."""
        state, options = self.progress, self.options
        cost, decode, state.cost_s, state.decode_s = state.cost_s, state.decode_s, 0.0, 0.0
        state.metrics["timing_s/drafter"] = cost
        if state.off or not decode or state.agreement is None:
            return
        now, before = (tokens_per_pass(a, options.draft_tokens) for a in (state.agreement, state.agreement_initial))
        saved = decode * (now / before - 1)  # the initial drafter would need now / before as many passes
        state.metrics["drafter/saved_s_est"] = saved
        state.window = [*state.window, (cost, saved)][-options.patience :] if options.patience else []
        spent, gained = (sum(column) for column in zip(*state.window, strict=True)) if state.window else (0.0, 0.0)
        if len(state.window) == options.patience and gained < spent:
            self._stop(
                f"it does not pay: over {options.patience} rollouts it took {spent:.3g} s and saved an estimated "
                f"{gained:.3g} s (agreement {state.agreement:.2f}, initial drafter {state.agreement_initial:.2f})"
            )

    def _diverged(self, reason: str) -> None:
        _blend(self.drafter.parameters(), self._good)
        self._stop(f"it diverged ({reason}); the last good weights are back. Lower the drafter's learning rate")

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
        self.progress.cost_s += time.perf_counter() - began

    # Checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """`tensors`: weights and moments, shared with the trainer; `values`: the rest, as JSON can hold it."""
        models = {"drafter": self.drafter, "initial": self._initial, "average": self._average}
        tensors = {f"{kind}/{name}": p.detach() for kind, model in models.items() if model is not None
                   for name, p in model.named_parameters()}  # fmt: skip
        for i, moments in self._optimizer.state_dict()["state"].items():
            tensors |= {f"adamw/{i}/{name}": value for name, value in moments.items()}
        return {"tensors": tensors, "values": asdict(self.progress) | {"texts": [asdict(t) for t in self._texts]}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Goes on from a state of a trainer with a drafter of the same shape and the same `reference`.

        Raises:
            RolloutError: the state is another drafter's; nothing was loaded.
        """
        moments: dict[int, dict[str, Tensor]] = {}
        weights = {name: tensor for name, tensor in state["tensors"].items() if not name.startswith("adamw/")}
        for name in state["tensors"].keys() - weights.keys():
            _, i, moment = name.split("/")
            moments.setdefault(int(i), {})[moment] = state["tensors"][name].clone()
        own = {name: p for name, p in self.state_dict()["tensors"].items() if not name.startswith("adamw/")}
        for name in sorted(own.keys() | weights.keys()):
            here, there = (tuple(t[name].shape) if name in t else "absent" for t in (own, weights))
            if here != there:
                raise RolloutError(
                    f"the saved co-training state belongs to another drafter: {name} is {there} there and {here} here. "
                    "Resume with the drafter and the options that the run began with"
                )
        values = dict(state["values"])
        texts = [{k: tuple(v) if isinstance(v, list) else v for k, v in text.items()} for text in values.pop("texts")]
        self.progress, self._texts = Progress(**values), [Text(**text) for text in texts]
        _blend(own.values(), (weights[name] for name in own))
        _blend(self._good, self.drafter.parameters())
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})

    def save(self, directory: Path) -> None:
        """Writes the state into a checkpoint's directory, whose marker makes it count."""
        directory.mkdir(parents=True, exist_ok=True)
        state = self.state_dict()
        blob = safetensors.torch.save({name: tensor.contiguous() for name, tensor in state["tensors"].items()})
        (directory / WEIGHTS).write_bytes(blob)
        values = state["values"] | {"checksum": blake2b(blob).hexdigest()}
        (directory / STATE).write_text(json.dumps(values), encoding="utf-8")

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote. Raises RolloutError when it is missing, damaged or another drafter's."""
        try:
            blob = (directory / WEIGHTS).read_bytes()
            values = json.loads((directory / STATE).read_text(encoding="utf-8"))
            if blake2b(blob).hexdigest() != values.pop("checksum"):
                raise ValueError(f"{WEIGHTS} is not the one that {STATE} was written with")
            self.load_state_dict({"tensors": safetensors.torch.load(blob), "values": values})
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise RolloutError(
                f"the co-training state in {directory} cannot be read: {error}. Resume from an older checkpoint, or "
                "remove the directory to begin with the initial drafter"
            ) from error


def tokens_per_pass(agreement: float, draft_tokens: int) -> float:
    """Expected tokens of a pass, its free one included, whose draft tokens are each accepted with that probability."""
    return sum(agreement**i for i in range(draft_tokens + 1))  # (1 - a^(k+1)) / (1 - a), also at a = 1


def _smooth(past: float | None, new: float) -> float:
    return new if past is None else SMOOTHING * past + (1 - SMOOTHING) * new


def within(texts: Sequence[Text], versions: int, tokens: int) -> list[Text]:
    """The latest of `texts` (oldest first) that hold at most `versions` weight versions' worth and `tokens` tokens."""
    kept, total = [], 0
    for text in reversed(texts):
        total += len(text)
        if text.version <= texts[-1].version - versions or total > tokens:
            break
        kept.append(text)
    return kept[::-1]


def batches(texts: Sequence[Text], count: int, tokens: int, generator: torch.Generator) -> Iterator[list[Text]]:
    """`count` random batches of at most `tokens` tokens or one text; a text returns when all have had their turn."""
    order: list[int] = []
    for _ in range(count):
        batch: list[Text] = []
        total = 0
        while len(batch) < len(texts):
            order = order or torch.randperm(len(texts), generator=generator).tolist()
            total += len(texts[order[-1]])
            if batch and total > tokens:
                break
            batch.append(texts[order.pop()])
        yield batch


def rejected(texts: Sequence[Text]) -> Tensor:
    """True [N] where a draft was rejected, in the order of `response_logits`."""
    return torch.tensor([i in errors for t in texts for errors in [set(t.errors)] for i in range(len(t.response))])


def response_logits(model: torch.nn.Module, texts: Sequence[Text]) -> Tensor:
    """Logits [N, V], in evaluation mode, that predict each response token of each text, one text after the other.

    The logits of response token t are those *at* the token before it, sequence index len(prompt) + t - 1. Padding is on
    the right, where causal attention never looks.
    """
    training = model.training
    model.eval()
    head = model.get_output_embeddings()
    ids = pad_sequence([torch.tensor([*t.prompt, *t.response[:-1]]) for t in texts], batch_first=True)
    hidden = model.base_model(input_ids=ids.to(head.weight.device), use_cache=False).last_hidden_state
    model.train(training)
    return head(torch.cat([row[len(t.prompt) - 1 :][: len(t.response)] for row, t in zip(hidden, texts, strict=True)]))


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
            f"the drafter shares {len(shared)} weights with the policy ({shared[0]}, ...), as early exit does: "
            "training it would change the policy. Copy the layers into a drafter of its own, or leave co-training off"
        )


@torch.no_grad()
def _blend(into: Iterable[Tensor], values: Iterable[Tensor], weight: float = 1.0) -> None:
    """Moves each tensor towards its value in place; weight 1 copies, NaN included."""
    for tensor, value in zip(into, values, strict=True):
        tensor.copy_(value if weight == 1.0 else tensor.lerp(value, weight))
