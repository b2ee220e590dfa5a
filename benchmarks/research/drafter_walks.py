"""Rollouts of known texts with drafts, replayed pass by pass without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.research.mask_drafter import MaskDrafter, ends_of
from benchmarks.research.responses import response_logits
from specrl.rollout.noise import keyed_sample
from specrl.trainers.cotraining.texts import Text

LONGEST = 16  # drafts of a chain
Cost = Callable[..., np.ndarray]
"""Milliseconds of passes, of their rows, tokens, width and scored tokens; see benchmarks/research/drafter_costs.py."""


@dataclass(frozen=True)
class Grid:
    """What a drafter answers to every prefix of some responses."""

    accepted: np.ndarray
    """bool [R, T + K, K]: its draft at depth j after prefix t is the response's token t + j."""
    chance: np.ndarray
    """float32 [R, T + K, K]: the probability that it gave its drafts up to depth j."""
    lengths: np.ndarray
    """int64 [R]: tokens of each response."""

    def by_depth(self, most: int = 8) -> dict[str, list[float]]:
        """At depths 1.. : shares of positions where the draft is accepted, alone and given that all before it are."""
        depth = min(most, self.accepted.shape[-1])
        alive = np.arange(self.accepted.shape[1])[:, None] + np.arange(depth) < self.lengths[:, None, None]
        accepted, all_accepted = self.accepted[..., :depth], np.cumprod(self.accepted[..., :depth], -1).astype(bool)
        before = np.concatenate([np.ones_like(all_accepted[..., :1]), all_accepted[..., :-1]], -1) & alive
        return {
            "alone": ((accepted & alive).sum((0, 1)) / alive.sum((0, 1))).round(4).tolist(),
            "given": ((accepted & before).sum((0, 1)) / np.maximum(1, before.sum((0, 1)))).round(4).tolist(),
        }

    def blinded(self, share: float) -> Grid:
        """The same when so many tokens of the responses, by chance, are ones that the drafter cannot draw."""
        rows, positions, depth = self.accepted.shape
        seen = np.random.default_rng(0).random((rows, positions + depth)) >= share
        windows = np.lib.stride_tricks.sliding_window_view(seen, depth, axis=1)[:, :positions]
        return replace(self, accepted=self.accepted & windows)


@dataclass(frozen=True)
class Way:
    """A way of drafting on one machine."""

    name: str
    grid: Grid
    cost: Cost
    at_once: bool = False
    """One pass of the drafter gives all drafts."""


def chain_grid(model: PreTrainedModel, texts: Sequence[Text], keys: Sequence[int]) -> Grid:
    """Of a model that drafts one token after the other: after accepted drafts it answers the response's prefix."""
    answers = []
    for text, key in zip(texts, keys, strict=True):
        with torch.inference_mode():
            logits = response_logits(model, [text]).float()
        answers.append(_drawn(logits, text, key, torch.arange(len(text.response))))
    return grid_of(answers)


def grid_of(answers: Sequence[tuple[np.ndarray, np.ndarray]]) -> Grid:
    """Of a drafter that answers the same whatever its drafts before were, as long as all of them are accepted.

    Args: answers: of each response, whether its guess of every token is right, and the guess's log-prob.
    """
    lengths = np.array([len(right) for right, _ in answers])
    width = lengths.max() + LONGEST
    accepted = np.zeros((len(answers), width + LONGEST), bool)
    logp = np.zeros(accepted.shape, np.float32)
    for row, (right, chance) in enumerate(answers):
        accepted[row, : len(right)] = right
        logp[row, : len(right)] = chance
    windows = (np.lib.stride_tricks.sliding_window_view(a, LONGEST, axis=1)[:, :width] for a in (accepted, logp))
    accepted, logp = (np.ascontiguousarray(w) for w in windows)
    return Grid(accepted, np.exp(logp.cumsum(-1)), lengths)


def masked_grid(drafter: MaskDrafter, texts: Sequence[Text], keys: Sequence[int]) -> Grid:
    """Of a drafter that answers all depths at once."""
    width = max(len(text.response) for text in texts) + LONGEST
    accepted = np.zeros((len(texts), width, drafter.depth), bool)
    logp = np.zeros(accepted.shape, np.float32)
    for row, (text, key) in enumerate(zip(texts, keys, strict=True)):
        ends = ends_of(text, drafter.depth)
        with torch.inference_mode():
            logits = drafter([ends])
        at = (ends.ends[ends.answering] - ends.first).numpy(), ends.depths[ends.answering].numpy()
        accepted[row][at], logp[row][at] = _drawn(logits, text, key, ends.answers)
    return Grid(accepted, np.exp(logp.cumsum(-1)), np.array([len(text.response) for text in texts]))


def _drawn(logits: torch.Tensor, text: Text, key: int, answers: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Whether the draws at `answers` are the response's tokens, and their log-probs."""
    draws, logp, *_ = keyed_sample(logits, torch.full_like(answers, key), answers)
    return (draws == torch.tensor(text.response)[answers]).numpy(), logp.numpy()


@dataclass(frozen=True)
class Plan:
    """What a pass at every position of some responses does, int64 [R, T]."""

    tried: np.ndarray
    """Draft tokens that the drafter makes, one pass after the other; 0 where the draft costs no pass."""
    carried: np.ndarray
    """Draft tokens that the pass verifies."""
    taken: np.ndarray
    """Of them, those that are accepted."""

    def unless(self, other: Plan, where: np.ndarray) -> Plan:
        """This plan, and the other one at the positions `where` [R, T]."""
        names = "tried", "carried", "taken"
        return Plan(*(np.where(where, getattr(other, name), getattr(self, name)) for name in names))


def planned(grid: Grid, most: int, doubt: float) -> Plan:
    """Drafts of at most `most` tokens. Args: doubt: least estimated probability that all up to a token are accepted."""
    left = grid.lengths[:, None] - np.arange(grid.accepted.shape[1])
    limit = np.clip(left, 0, most)
    sure = (limit[..., None] > np.arange(most)) & (grid.chance[..., :most] >= doubt)
    carried = np.cumprod(sure, -1).sum(-1)
    taken = np.cumprod(sure & grid.accepted[..., :most], -1).sum(-1)
    return Plan(np.minimum(carried + 1, limit), carried, taken)


def walk(plan: Plan, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """The passes [P, R] of all rows until their texts of these lengths [R] end.

    Of each pass: whether a row is `alive`, its position `at` in the response, tokens `unread` by the drafter that it
    now reads, drafts `tried` and `carried`.
    """
    rows = np.arange(len(lengths))
    at, unread, passes = np.zeros_like(rows), np.ones_like(rows), []
    while (alive := at < lengths).any():
        tried = plan.tried[rows, at] * alive
        passes.append((alive, at, unread * (tried > 0), tried, plan.carried[rows, at] * alive))
        emitted = np.minimum(plan.taken[rows, at] + 1, lengths - at) * alive
        unread = unread * (tried == 0) + emitted
        at = at + emitted
    return dict(
        zip(("alive", "at", "unread", "tried", "carried"), map(np.stack, zip(*passes, strict=True)), strict=True)
    )


def seconds(passes: dict[str, np.ndarray], prompts: np.ndarray, rows: int, policy: Cost, way: Way, most: int) -> float:
    """That all batches of so many rows take. Args: prompts: tokens of each row's prompt."""
    batches = {name: values.reshape(len(values), -1, rows) for name, values in passes.items()}
    alive = batches["alive"]
    count, width = alive.sum(-1), ((prompts + passes["at"]).reshape(alive.shape) * alive).max(-1)
    tokens = count + batches["carried"].sum(-1)
    ms = policy(count, tokens, width, tokens) * (count > 0)
    unread = (batches["unread"] * alive).sum(-1)
    if way.at_once and most:
        going = (batches["tried"] > 0).sum(-1)
        ms = ms + way.cost(going, unread + going * (most - 1), width, going * most) * (going > 0)
    for depth in range(0 if way.at_once else most):
        going = (batches["tried"] > depth).sum(-1)
        ms = ms + way.cost(going, going if depth else unread, width, going) * (going > 0)
    return ms.sum() / 1e3
