"""When should a chain of drafts stop?

    python benchmarks/research/stop_rules.py [drafter=DIR] [texts=192] [out=FILE.json]

Each rule estimates, token by token, whether a draft model's keyed draw is the policy's token. All rules see the same
positions of the same responses of the embedded policy and learn online: they estimate a response, then learn from its
labels, which verification gives for free. The second quarter of the responses chooses the thresholds, the second half
is reported.

- confidence: the accepted share of draws of equal confidence (binned by the draw's probability)
- margin: the same, binned by how far the draw's perturbed log-prob leads the second's
- entropy: the same, binned by the entropy of the draft model's distribution
- svip: 1 - sqrt(0.15 H), as published (arXiv 2411.18462); it learns nothing
- head: logistic regression on the draft model's last hidden state and entropy, SpecDec++ (arXiv 2405.19715)

`auc` is the probability that an accepted draw ranks above a rejected one. Tokens per cost: a row drafts while the
product of the estimates exceeds a threshold; a pass costs 1 and a draft token `price`. The interval is a paired
bootstrap over responses of the gain over `confidence`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.research.responses import response_states
from benchmarks.research.selfspec.layers import early_exit
from specrl.results import tables
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.keys import derive_key
from specrl.rollout.noise import keyed_sample
from specrl.rollout.types import Request
from specrl.run.tasks import arithmetic
from specrl.tiny import load_tiny
from specrl.trainers.cotraining.texts import Text

CAP, EXIT_LAYERS, SVIP_C, LONGEST = 200, 2, 0.15, 24
PRICES = (0.05, 0.15, 0.3)
THRESHOLDS = [0.02 * i for i in range(1, 50)]


@dataclass(frozen=True)
class Positions:
    """What a draft model knows unverified, at every position [T] of one response, and whether it was right."""

    logprob: Tensor
    margin: Tensor
    entropy: Tensor
    hidden: Tensor
    accepted: Tensor


def main(drafter: str = "", texts: str = "192", out: str = "") -> None:
    torch.set_num_threads(1)
    policy, tokenizer = load_tiny()
    models = {f"first {EXIT_LAYERS} layers": early_exit(policy, EXIT_LAYERS)}
    if drafter:
        loaded = AutoModelForCausalLM.from_pretrained(drafter, dtype=torch.float32, local_files_only=True)
        models[f"distilled, {loaded.config.num_hidden_layers} layer(s)"] = loaded.eval()
    prompts = [tokenizer(p.prompt)["input_ids"] for p in arithmetic("test", int(texts), 0, "medium")]
    requests = [Request(prompt, derive_key(0, "stop", i, 0), CAP) for i, prompt in enumerate(prompts)]
    engine = TransformersEngine(policy, SamplingParams(frozenset([tokenizer.eos_token_id])))
    done, _ = engine.generate(requests)
    found = []
    for name, model in models.items():
        seen = [positions(model, r.prompt, c.tokens, r.key) for r, c in zip(requests, done, strict=True)]
        lines = compare(seen)
        show(name, seen, lines)
        found += [{"drafter": name, **line} for line in lines]
    if out:
        Path(out).write_text(json.dumps({"texts": int(texts), "cases": found}, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def positions(model, prompt: Sequence[int], tokens: Sequence[int], key: int) -> Positions:
    """The model's keyed draws along the policy's own text: a chain's draws as long as all before were accepted."""
    hidden = response_states(model, [Text(tuple(prompt), tuple(tokens))])
    logits = model.get_output_embeddings()(hidden).float()
    at = torch.arange(len(tokens))
    draws, logprob, _, margin = keyed_sample(logits, torch.full_like(at, key), at)
    logprobs = logits.log_softmax(-1)
    return Positions(logprob, margin, -(logprobs.exp() * logprobs).sum(-1), hidden, draws == torch.tensor(tokens))


class Binned:
    """Share of accepted draws among those whose feature fell into the same of 16 equally filled bins."""

    def __init__(self, feature: Callable[[Positions], Tensor], sample: Sequence[Positions]):
        values = torch.cat([feature(seen) for seen in sample])
        self._feature, self._edges = feature, values.quantile(torch.linspace(0, 1, 17)[1:-1])
        self._counts = torch.full((16, 2), 1.0)

    def estimate(self, seen: Positions) -> Tensor:
        bins = torch.bucketize(self._feature(seen), self._edges)
        return self._counts[bins, 1] / self._counts[bins].sum(-1)

    def learn(self, seen: Positions) -> None:
        bins = torch.bucketize(self._feature(seen), self._edges)
        self._counts.index_put_((bins, seen.accepted.long()), torch.ones(len(bins)), accumulate=True)


class Svip:
    def estimate(self, seen: Positions) -> Tensor:
        return (1 - (SVIP_C * seen.entropy).sqrt()).clamp(0, 1)

    def learn(self, seen: Positions) -> None:
        pass


class Head:
    """Logistic regression, a few AdamW steps on each response and on an earlier one."""

    def __init__(self, features: Callable[[Positions], Tensor], sample: Sequence[Positions]):
        values = torch.cat([features(seen) for seen in sample])
        self._features, self._mean, self._std = features, values.mean(0), values.std(0) + 1e-6
        self._linear = torch.nn.Linear(values.shape[-1], 1)
        torch.nn.init.zeros_(self._linear.weight)
        self._optimizer = torch.optim.AdamW(self._linear.parameters(), 3e-3, weight_decay=0.01)
        self._past: list[Positions] = []

    def _logit(self, seen: Positions) -> Tensor:
        return self._linear((self._features(seen) - self._mean) / self._std)[:, 0]

    @torch.no_grad()
    def estimate(self, seen: Positions) -> Tensor:
        return self._logit(seen).sigmoid()

    def learn(self, seen: Positions) -> None:
        self._past.append(seen)
        for text in (seen, *random.Random(len(self._past)).choices(self._past, k=7)):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(self._logit(text), text.accepted.float())
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()


def compare(seen: Sequence[Positions]) -> list[dict]:
    """One line per rule over the second half of the responses."""
    half = len(seen) // 2
    sample = seen[:16]
    rules = {
        "confidence": Binned(lambda s: s.logprob, sample),
        "margin": Binned(lambda s: s.margin, sample),
        "entropy": Binned(lambda s: s.entropy, sample),
        "svip": Svip(),
        "head": Head(lambda s: torch.cat([s.hidden, s.entropy[:, None]], -1), sample),
        "head with margin": Head(
            lambda s: torch.cat([s.hidden, s.entropy[:, None], s.logprob[:, None], s.margin[:, None].log1p()], -1),
            sample,
        ),
        "oracle": None,
    }
    estimates = {}
    for name, rule in rules.items():
        estimates[name] = []
        for text in seen:
            estimates[name].append(text.accepted.float() if rule is None else rule.estimate(text))
            if rule is not None:
                rule.learn(text)
    lines = []
    spent: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for name, values in estimates.items():
        line = {"rule": name, "auc": auc(torch.cat(values[half:]), torch.cat([s.accepted for s in seen[half:]]))}
        for price in PRICES:
            known = list(zip(values[half // 2 : half], seen[half // 2 : half], strict=True))
            best = max(THRESHOLDS, key=lambda t, p=price, known=known: goodput([chain(*x, t, p) for x in known]))
            spent[name, price] = [chain(v, s, best, price) for v, s in zip(values[half:], seen[half:], strict=True)]
            line[f"tokens per cost at {price}"] = goodput(spent[name, price])
            line[f"gain at {price}"] = bootstrap(spent["confidence", price], spent[name, price])
        lines.append(line)
    return lines


def chain(estimate: Tensor, seen: Positions, threshold: float, price: float) -> tuple[float, float]:
    """(tokens, cost) of decoding one response."""
    p, accepted = estimate.tolist(), seen.accepted.tolist()
    at, cost = 0, 0.0
    while at < len(p):
        chance, drafted, good = 1.0, 0, 0
        while at + drafted < len(p) and drafted < LONGEST and (chance := chance * p[at + drafted]) >= threshold:
            good += good == drafted and accepted[at + drafted]
            drafted += 1
        drafted += at + drafted < len(p) and drafted < LONGEST  # the draw that ends the chain was made, too
        cost += 1 + price * drafted
        at += good + 1
    return float(len(p)), cost


def goodput(spent: Sequence[tuple[float, float]]) -> float:
    return sum(tokens for tokens, _ in spent) / sum(cost for _, cost in spent)


def bootstrap(base: Sequence, other: Sequence, times: int = 400) -> tuple[float, float]:
    """Interval that holds 90 % of the resampled gains of `other` over `base`."""
    rng = random.Random(0)
    gains = []
    for _ in range(times):
        at = rng.choices(range(len(base)), k=len(base))
        gains.append(goodput([other[i] for i in at]) / goodput([base[i] for i in at]) - 1)
    gains.sort()
    return gains[times // 20], gains[-times // 20 - 1]


def auc(score: Tensor, accepted: Tensor) -> float:
    """Mann-Whitney's statistic with ties counted half."""
    good, bad = score[accepted], score[~accepted].sort().values
    below, upto = torch.searchsorted(bad, good), torch.searchsorted(bad, good, right=True)
    return ((below + upto).double().mean() / (2 * len(bad))).item()


def show(name: str, seen: Sequence[Positions], lines: Sequence[dict]) -> None:
    accepted = torch.cat([s.accepted for s in seen])
    rows = []
    for line in lines:
        cells = []
        for price in PRICES:
            low, high = line[f"gain at {price}"]
            cells.append(f"{line[f'tokens per cost at {price}']:.3f} ({low:+.1%} to {high:+.1%})")
        rows.append((line["rule"], f"{line['auc']:.3f}", *cells))
    title = f"{name}: {len(accepted)} positions, {accepted.float().mean():.1%} accepted"
    columns = ("rule", "auc", *(f"tokens per cost at {price}" for price in PRICES))
    tables.show(Console(width=130), title, columns, rows)


if __name__ == "__main__":
    main(**dict(word.split("=", 1) for word in sys.argv[1:]))
