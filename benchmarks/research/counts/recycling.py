"""Token Recycling (arXiv 2408.08696): the best two tokens of every position that was verified, as later guesses.

A pass computes the policy's distribution after every token that it reads. The table keeps the two likeliest tokens of
the last position with the same last token, as published, or with the same last 6, 4 or 3 tokens, as `contexts` keeps
the one token that followed. Both know responses to other prompts; the recycled ones also know the row's own text so
far, which `contexts` does not. An estimate is the share of right guesses among those of about the same probability.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.research.counts.record import Record, plans_of
from benchmarks.research.drafter_walks import Plan, grid_of
from benchmarks.research.responses import response_logits
from specrl.rollout.drafting.contexts import ContextTable
from specrl.trainers.cotraining.texts import Text

ONE, SEVERAL = (1,), (6, 4, 3)
ROLLOUT = 64  # responses that `contexts` learns together
BINS = 16
Guess = tuple[int, int, float]
"""The best two tokens, and the probability of the first."""


class Recycled:
    """The latest best two tokens after each context. Args: lengths: of the contexts in tokens, longest first."""

    def __init__(self, lengths: Sequence[int]):
        self._lengths = lengths
        self._table: dict[tuple[int, ...], Guess] = {}

    def learn(self, before: Sequence[int], guess: Guess) -> None:
        for length in self._lengths:
            self._table[tuple(before[-length:])] = guess

    def guess(self, before: Sequence[int], own: Recycled) -> Guess | None:
        """Args: own: what the row's own text has shown so far."""
        for length in self._lengths:
            context = tuple(before[-length:])
            if found := own._table.get(context) or self._table.get(context):
                return found
        return None


def measure(record: Record) -> dict:
    """Shares of right guesses and the best speed of each way of guessing."""
    learnt = [best_two(record.policy, text) for text in record.learnt]
    held_out = [best_two(record.policy, text) for text in record.texts]
    kinds = {"contexts": of_contexts(record)}
    for name, lengths in (("recycled by one token", ONE), ("recycled by 6, 4, 3 tokens", SEVERAL)):
        kinds[name] = of_recycled(record, learnt, held_out, lengths)
    both = [second_of(a, b) for a, b in zip(kinds["contexts"], kinds["recycled by 6, 4, 3 tokens"], strict=True)]
    result = {}
    for name, guesses in (kinds | {"contexts, then the best recycled one": both}).items():
        grid = grid_of([(ranks == 0, logp) for ranks, logp in guesses])
        every = np.concatenate([ranks for ranks, _ in guesses])
        result[name] = {
            "right": round(float((every == 0).mean()), 4),
            "second right": round(float((every == 1).mean()), 4),
            "one guess": record.best(plans_of(grid)),
        }
        if name != "contexts":
            result[name]["two guesses"] = record.best(with_second(plans_of(grid), [ranks for ranks, _ in guesses]))
    return result


def best_two(policy, text: Text) -> list[Guess]:
    """After each token before the response's tokens."""
    values, ids = response_logits(policy, [text]).float().softmax(-1).topk(2)
    return [(*pair, value[0]) for pair, value in zip(ids.tolist(), values.tolist(), strict=True)]


def of_contexts(record: Record) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each held-out text the ranks of its tokens among the guesses (2: none), and the log-prob of the first."""
    table = ContextTable()
    for at in range(0, len(record.learnt), ROLLOUT):
        table.learn((text.prompt, text.response) for text in record.learnt[at : at + ROLLOUT])
    found = []
    for text in record.texts:
        whole = (*text.prompt, *text.response)
        guesses = [table.next(whole[max(0, at - 6) : at]) for at in range(len(text.prompt), len(whole))]
        ranks = [0 if g and g[0] == token else 2 for g, token in zip(guesses, text.response, strict=True)]
        found.append((np.array(ranks), np.log([max(g[1], 1e-6) if g else 1e-6 for g in guesses])))
    return found


def of_recycled(
    record: Record, learnt: Sequence, held_out: Sequence, lengths: Sequence[int]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """As of contexts."""
    table, ranks, chances = Recycled(lengths), [], []
    for text, guesses in zip(record.learnt, learnt, strict=True):
        for at, guess in enumerate(guesses):
            table.learn((*text.prompt, *text.response[:at])[-SEVERAL[0] :], guess)
    for text, guesses in zip(record.texts, held_out, strict=True):
        own, told = Recycled(lengths), []
        for at, guess in enumerate(guesses):
            before = (*text.prompt, *text.response[:at])[-SEVERAL[0] :]
            told.append(table.guess(before, own) or (-1, -1, 0.0))
            own.learn(before, guess)
        pairs = zip(told, text.response, strict=True)
        ranks.append(np.array([2 if token not in g[:2] else g.index(token) for g, token in pairs]))
        chances.append(torch.tensor([g[2] for g in told]))
    return [(rank, calibrated(chance, chances, ranks)) for rank, chance in zip(ranks, chances, strict=True)]


def calibrated(chance: Tensor, chances: Sequence[Tensor], ranks: Sequence[np.ndarray]) -> np.ndarray:
    """Log share of right first guesses among those of about the same probability."""
    every, right = torch.cat([*chances]), torch.from_numpy(np.concatenate(ranks) == 0).float()
    edges = every.quantile(torch.linspace(0, 1, BINS + 1)[1:-1]).unique()
    bins = torch.bucketize(every, edges)
    share = torch.bincount(bins, right, len(edges) + 1) / torch.bincount(bins, minlength=len(edges) + 1).clamp(min=1)
    return share[torch.bucketize(chance, edges)].clamp(min=1e-6).log().numpy()


def second_of(first: tuple, other: tuple) -> tuple[np.ndarray, np.ndarray]:
    """The first guess of one way; the second is the other way's first one, which is right where the first is not."""
    ranks = np.where(first[0] == 0, 0, np.where(other[0] == 0, 1, 2))
    return ranks, first[1]


def with_second(plans: Iterable[tuple[Mapping, Plan]], ranks: Sequence[np.ndarray]) -> Iterable[tuple[Mapping, Plan]]:
    """The second guess is verified with each token; where it is the right one, one more token is accepted."""
    for settings, plan in plans:
        filled = np.full(plan.taken.shape, 2)
        for row, own in enumerate(ranks):
            filled[row, : len(own)] = own
        at = np.minimum(np.arange(filled.shape[1]) + plan.taken, filled.shape[1] - 1)
        more = (plan.taken < plan.carried) & (np.take_along_axis(filled, at, 1) == 1)
        yield settings, Plan(plan.tried, 2 * plan.carried, plan.taken + more)
