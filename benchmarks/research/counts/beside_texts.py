"""PARD (arXiv 2504.18583) and a head, both beside texts, which take most of the positions that are easy to draft.

Texts are the prompt, the row's own text, one stored text of the prompt or none, and `contexts`, all free. A drafter
agrees at the share of positions that `drafters-cpu.json` measured at each depth, and of a head 88 %: at those that the
recorded one-layer model is surest of, so that drafters and texts find the same positions easy. A position drafts from
the texts where their expected accepted tokens reach a share of the drafter's; every cell has its best share, draft
length and threshold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.research import drafter_costs as costs
from benchmarks.research.counts.longest import matching
from benchmarks.research.counts.record import Record
from benchmarks.research.counts.recycling import of_contexts
from benchmarks.research.drafter_walks import LONGEST, Grid, Plan, grid_of, planned
from benchmarks.research.responses import response_logits
from specrl.rollout.drafting.ngrams import append
from specrl.rollout.drafting.suffix import PromptTexts, find
from specrl.rollout.noise import keyed_sample
from specrl.trainers.cotraining.texts import Text

MEASURED = Path(__file__).parents[1] / "results" / "drafters-cpu.json"
HEAD = 0.88  # of its draws that are the policy's tokens
LAYERS = {"chain": 1, "chain, 3 layers": 3, "parallel, 3 layers": 3, "head": 1}
MOSTS, DOUBTS = (1, 2, 4, 8), (0.0, 0.2, 0.4, 0.6)
SHARES = (0.0, 0.5, 1.0, 2.0)  # of the drafter's expected tokens that texts must reach
TEXT_DOUBTS = (0.1, 0.3, 0.5)


def measure(record: Record) -> dict:
    """The best speed of each drafter on the simulated GPU: alone, in a first epoch, and with a stored text."""
    ease = easiest(record)
    known = {"alone": None, "first epoch": retrieved(record, False), "one stored text": retrieved(record, True)}
    result: dict = {}
    for when, texts in known.items():
        free = [] if texts is None else [planned(texts, LONGEST, doubt) for doubt in TEXT_DOUBTS]
        result[when] = {"texts only": record.best(({"most": 0}, costless(plan)) for plan in free)} if free else {}
        for name, layers in LAYERS.items():
            grid = agreeing(rates(name), ease, record.lengths)
            plans = beside(grid, texts) if texts else ((s, planned(grid, **s)) for s in settings(grid))
            at_once = name.startswith("parallel")
            result[when][name] = record.best(plans, costs.on_gpu(layers), at_once)
    return result


def settings(grid: Grid) -> Iterator[dict]:
    for most in (most for most in MOSTS if most <= grid.accepted.shape[-1]):
        yield from ({"most": most, "doubt": doubt} for doubt in DOUBTS)


def beside(grid: Grid, texts: Grid) -> Iterator[tuple[dict, Plan]]:
    """The drafter's plans with those of the texts at the positions where they are expected to bring enough."""
    for each in settings(grid):
        made = planned(grid, **each)
        for doubt in TEXT_DOUBTS:
            free = costless(planned(texts, LONGEST, doubt))
            for share in SHARES:
                where = (free.carried > 0) & (expected(texts, doubt) >= share * expected(grid, **each))
                yield each | {"text doubt": doubt, "text share": share}, made.unless(free, where)


def costless(plan: Plan) -> Plan:
    """The same without passes of a drafter."""
    return Plan(np.zeros_like(plan.tried), plan.carried, plan.taken)


def expected(grid: Grid, doubt: float, most: int = LONGEST) -> np.ndarray:
    """Accepted tokens of a draft by its estimates [R, T]."""
    chance = grid.chance[..., :most]
    return (chance * (chance >= doubt)).sum(-1)


# What the texts offer ------------------------------------------------------------------------------------------------


def retrieved(record: Record, stored: bool) -> Grid:
    """At each position the longest match in the texts, or what `contexts` expects where that is more."""
    accepted = np.zeros((len(record.texts), record.lengths.max() + 1, LONGEST), bool)
    level = np.zeros(accepted.shape[:2], int)
    offered = np.zeros(accepted.shape[:2], int)
    for row, text in enumerate(record.texts):
        known = [record.stored[row].response] if stored else []
        for at, (matched, draft) in enumerate(matches(text, known)):
            level[row, at], offered[row, at] = matched, len(draft)
            accepted[row, at, : len(draft)] = [a == b for a, b in zip(draft, padded(text, at), strict=False)]
    alive = np.arange(level.shape[1]) < record.lengths[:, None]
    chance = share_by(level[alive], accepted[..., 0][alive], level)[..., None] ** np.arange(1, LONGEST + 1)
    chance = chance * (np.arange(LONGEST) < offered[..., None])
    contexts = grid_of(of_contexts(record))
    width = level.shape[1]
    better = (expected(contexts, 0.1)[:, :width] > (chance * (chance >= 0.1)).sum(-1))[..., None]
    return Grid(
        np.where(better, contexts.accepted[:, :width], accepted),
        np.where(better, contexts.chance[:, :width], chance),
        record.lengths,
    )


def matches(text: Text, known: Sequence[Sequence[int]]) -> Iterator[tuple[int, Sequence[int]]]:
    """(matching tokens, what follows) at each position of the response, by the index of `rollout.sources`."""
    texts = PromptTexts(known, ("earlier", "group", "prompt"), text.prompt)
    own = texts.open()
    for at in range(len(text.response)):
        tokens = text.response[:at]
        found = find([texts], [tokens])[0] if at else []
        places = [(matching(texts.texts[n], place, tokens), texts.texts[n][place:]) for n, place, _ in found]
        best, draft = max(places, key=lambda place: place[0], default=(0, ()))
        yield best, draft[:LONGEST]
        append(own, [text.response[at]])


def padded(text: Text, at: int) -> Sequence[int]:
    return [*text.response[at : at + LONGEST], *[-1] * LONGEST]


def share_by(levels: np.ndarray, right: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Share of right ones at each of the asked levels, of all with the same level."""
    count = np.bincount(levels, minlength=asked.max() + 1)
    return (np.bincount(levels, right, len(count)) / np.maximum(1, count))[asked]


# What a drafter offers -----------------------------------------------------------------------------------------------


def rates(name: str) -> list[float]:
    """Share of positions at which a drafter agrees, by depth."""
    if name == "head":
        return [HEAD] * 8
    return json.loads(MEASURED.read_text(encoding="utf-8"))["agreement"][name]["alone"]


def easiest(record: Record) -> list[np.ndarray]:
    """Of each response's positions, how sure the one-layer model is: quantiles over all, the surest 0."""
    sure = []
    for text, key in zip(record.texts, record.keys, strict=True):
        at = torch.arange(len(text.response))
        logits = response_logits(record.chain, [text]).float()
        sure.append(keyed_sample(logits, torch.full_like(at, key), at)[1].numpy())
    order = np.argsort(np.argsort(-np.concatenate(sure), kind="stable"), kind="stable") / record.lengths.sum()
    return np.split(order, np.cumsum(record.lengths)[:-1])


def agreeing(shares: Sequence[float], ease: Sequence[np.ndarray], lengths: np.ndarray) -> Grid:
    """A drafter that agrees at so large a share of the positions at each depth, the easiest ones."""
    hardness = np.ones((len(ease), lengths.max() + LONGEST))
    for row, own in enumerate(ease):
        hardness[row, : len(own)] = own
    windows = np.lib.stride_tricks.sliding_window_view(hardness, len(shares), axis=1)[:, : lengths.max() + 1]
    return Grid(windows < np.array(shares), np.broadcast_to(np.cumprod(shares), windows.shape), lengths)
