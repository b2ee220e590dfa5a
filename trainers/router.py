"""Training from valued steps: the learned router, and process reward models that RSD asks."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

ROWS_PER_PASS = 32


@dataclass(frozen=True, slots=True)
class Record:
    """One visited prefix with what both models go on with, and what that is worth."""

    problem: str
    """Id of the example."""
    features: tuple[float, ...]
    """The router's input."""
    before: tuple[int, ...]
    """Problem and history."""
    draft_step: tuple[int, ...]
    policy_step: tuple[int, ...]
    draft_value: float
    policy_value: float

    @property
    def advantage(self) -> float:
        """What escalating gains, -1 to 1."""
        return self.policy_value - self.draft_value


@dataclass(frozen=True, slots=True)
class Fit:
    """Settings of one training."""

    epochs: int = 3
    learning_rate: float = 1e-5
    batch: int = 32
    seed: int = 0


def split(records: Sequence[Record], share: float, seed: int) -> tuple[list[Record], list[Record]]:
    """(training, validation) with about `share` of the problems in the second; no problem is in both."""
    problems = sorted({r.problem for r in records})
    random.Random(seed).shuffle(problems)
    held = set(problems[: max(1, round(share * len(problems)))])
    return [r for r in records if r.problem not in held], [r for r in records if r.problem in held]


def logistic(inputs: Sequence[Sequence[float]], targets: Sequence[bool], ridge: float = 1e-3) -> list[float]:
    """Logistic regression: a weight per feature and last the bias, by L-BFGS in float64; the same for any order.

    Args: ridge: penalty on the squared weights, the bias free, so that separable targets have a finite answer.
    """
    x, y = torch.tensor(inputs, dtype=torch.float64), torch.tensor(targets, dtype=torch.float64)
    x = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    weights = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=500, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        found = nn.functional.binary_cross_entropy_with_logits(x @ weights, y) + ridge * weights[:-1].square().sum()
        found.backward()
        return found

    optimizer.step(loss)
    return weights.tolist()


@torch.inference_mode()
def classify(model: nn.Module, inputs: Sequence[Sequence[int]]) -> list[float]:
    """Probability of the second class for each sequence of token ids."""
    found: list[float] = []
    for i in range(0, len(inputs), ROWS_PER_PASS):
        found += class_logits(model, inputs[i : i + ROWS_PER_PASS]).softmax(-1)[:, 1].tolist()
    return found


def class_logits(model: nn.Module, inputs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits [N, 2] float32 at the last token of each sequence; padding is on the right, where causal models miss it.

    transformers' own head looks for the last token that is not padding, which fails where padding and EOS are the same.
    """
    device = next(model.parameters()).device
    lengths = torch.tensor([len(ids) for ids in inputs], device=device)
    padded = [[*ids, *[0] * (int(lengths.max()) - len(ids))] for ids in inputs]
    mask = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
    hidden = model.base_model(input_ids=torch.tensor(padded, device=device), attention_mask=mask.long())[0]
    return model.score(hidden[torch.arange(len(inputs), device=device), lengths - 1]).float()


def fit(
    model: nn.Module,
    inputs: Sequence[Sequence[int]],
    targets: Sequence[float],
    held: Sequence[Sequence[int]],
    truth: Sequence[float],
    options: Fit,
) -> list[float]:
    """Trains a two-class model in place on cross-entropy and leaves it as it was after its best epoch.

    AdamW with linear warm-up over a tenth of the steps and linear decay. The best epoch has the largest Spearman
    correlation of its probabilities on `held` with `truth`, which needs no threshold.

    Args: targets: probability of the second class per input, 0 or 1 for hard labels.
    Returns: the correlation after each epoch.
    """
    rng = random.Random(options.seed)
    steps = options.epochs * -(-len(inputs) // options.batch)
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.learning_rate, total_steps=max(2, steps), pct_start=0.1, anneal_strategy="linear"
    )
    found: list[float] = []
    best = copy.deepcopy(model.state_dict())
    for _ in range(options.epochs):
        model.train()
        order = rng.sample(range(len(inputs)), len(inputs))
        for i in range(0, len(order), options.batch):
            chosen = order[i : i + options.batch]
            second = torch.tensor([float(targets[j]) for j in chosen], device=next(model.parameters()).device)
            logp = class_logits(model, [inputs[j] for j in chosen]).log_softmax(-1)
            loss = -(second * logp[:, 1] + (1 - second) * logp[:, 0]).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        found.append(spearman(classify(model.eval(), held), truth))
        if found[-1] == max(found):
            best = copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    model.eval()
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation of two sequences, equal values sharing their mean rank; 0 where one of them is constant."""
    x, y = (torch.tensor(_ranks(values), dtype=torch.float64) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    scale = (x.norm() * y.norm()).item()
    return (x @ y).item() / scale if scale else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    i = 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
            j += 1
        for k in order[i : j + 1]:
            ranks[k] = (i + j) / 2
        i = j + 1
    return ranks


def accuracy_by_class(scores: Sequence[float], advantages: Sequence[float], threshold: float) -> tuple[float, float]:
    """Share of steps with something to gain that a threshold escalates, and of the others that it keeps."""
    gain = [score > threshold for score, advantage in zip(scores, advantages, strict=True) if advantage > 0]
    rest = [score <= threshold for score, advantage in zip(scores, advantages, strict=True) if advantage <= 0]
    nan = float("nan")
    return sum(gain) / len(gain) if gain else nan, sum(rest) / len(rest) if rest else nan
