"""DySpec (arXiv 2410.11744): a tree grown by the draft model's own probabilities; RASD (2503.03434): a retrieved path
merged with a drafted one.

A tree holds every path whose estimated probability reaches a threshold, with at most so many guesses at a position: the
draft model's next best tokens, by its logits and the policy's noise. A guess's estimate is the share of right ones
among those of its rank at positions of about the same confidence. A path that has left the text is given the estimates
of the text's own positions, and a pass of the draft model over several paths costs what it costs over one, both of
which favour trees. Merged paths share the tokens that both have right.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import torch

from benchmarks.research.counts.beside_texts import TEXT_DOUBTS, costless, expected, retrieved, share_by
from benchmarks.research.counts.record import ONE_LAYER, Record
from benchmarks.research.drafter_walks import LONGEST, Grid, Plan, grid_of, planned
from benchmarks.research.responses import response_logits
from benchmarks.research.selfspec import texts as keyed
from specrl.rollout.noise import gumbel, row_words

WIDTHS = (1, 2, 4)  # guesses at a position
MOSTS, DOUBTS = (2, 4, LONGEST), (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
SHARES = (0.0, 0.5, 1.0, 2.0, 1000.0)  # of the chain's expected tokens from which on the text is drafted alone
BINS = 16


def measure(record: Record) -> dict:
    """The best speed of each way on the simulated GPU."""
    ranks, estimates = guesses(record)
    found = np.concatenate(ranks)
    result: dict = {"right within": {str(n): round(float((found < n).mean()), 4) for n in WIDTHS}}
    for width in WIDTHS:
        name = "chain" if width == 1 else f"tree of {width} guesses"
        plans = (
            ({"most": most, "doubt": doubt}, grown(ranks, estimates, width, doubt, most))
            for most in MOSTS
            for doubt in DOUBTS
        )
        result[name] = record.best(plans, ONE_LAYER)
    chain = grid_of([(r == 0, np.log(e[:, 0])) for r, e in zip(ranks, estimates, strict=True)])
    for when, stored in {"first epoch": False, "one stored text": True}.items():
        texts = retrieved(record, stored)
        for name, merging in {"text or chain": False, "text, chain or both merged": True}.items():
            result[f"{when}: {name}"] = record.best(competing(chain, texts, merging), ONE_LAYER)
    return result


def guesses(record: Record) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Of each response the ranks [T] of its tokens among the draft model's, and the estimates [T, W] by rank."""
    ranks, sure = [], []
    for text, key in zip(record.texts, record.keys, strict=True):
        at = torch.arange(len(text.response))
        logp = response_logits(record.chain, [text]).float().log_softmax(-1)
        noise = gumbel(*row_words(torch.full_like(at, key), at), logp.shape[-1])
        ranks.append(keyed.Text(text.prompt, text.response, noise).ranks(logp).numpy())
        sure.append(logp.gather(-1, (logp + noise).argmax(-1, keepdim=True))[:, 0].numpy())
    every = np.concatenate(sure)
    edges = np.unique(np.quantile(every, np.linspace(0, 1, BINS + 1)[1:-1]))
    bins, seen = np.digitize(every, edges), np.concatenate(ranks)
    shares = [share_by(bins, seen == rank, np.arange(len(edges) + 1)) for rank in range(max(WIDTHS))]
    table = np.maximum(np.stack(shares, -1), 1e-6)
    return ranks, [table[np.digitize(own, edges)] for own in sure]


def grown(ranks: list[np.ndarray], estimates: list[np.ndarray], width: int, doubt: float, most: int = LONGEST) -> Plan:
    """The tree of each position. Args: most: tokens of a path."""
    shape = len(ranks), max(map(len, ranks)) + 1
    tried, carried, taken = (np.zeros(shape, int) for _ in range(3))
    for row, (own, table) in enumerate(zip(ranks, estimates, strict=True)):
        chances = table[:, :width].tolist()
        for at in range(len(own)):
            sizes = levels(chances[at : at + most], 1.0, doubt)
            carried[row, at] = sum(sizes)
            tried[row, at] = min(len(sizes) + 1, most, len(own) - at)
            taken[row, at] = accepted(own[at : at + most].tolist(), chances[at : at + most], doubt)
    return Plan(tried, carried, taken)


def levels(chances: list[list[float]], chance: float, doubt: float, depth: int = 0) -> list[int]:
    """Tokens at each depth of the tree below a path of this depth and probability. Args: chances: at each depth."""
    sizes: list[int] = []
    if depth == len(chances):
        return sizes
    for estimate in chances[depth]:
        if chance * estimate >= doubt:
            below = [1, *levels(chances, chance * estimate, doubt, depth + 1)]
            sizes += [0] * (len(below) - len(sizes))
            sizes[: len(below)] = [a + b for a, b in zip(sizes, below, strict=False)]
    return sizes


def accepted(ranks: list[int], chances: list[list[float]], doubt: float) -> int:
    """Tokens of the tree's path that is the text."""
    chance = 1.0
    for depth, (rank, estimates) in enumerate(zip(ranks, chances, strict=True)):
        chance *= estimates[rank] if rank < len(estimates) else 0.0
        if chance < doubt:
            return depth
    return len(ranks)


def competing(chain: Grid, texts: Grid, merging: bool) -> Iterator[tuple[dict, Plan]]:
    """The text where it is expected to bring enough, elsewhere the chain. Args: merging: or elsewhere both."""
    width = texts.accepted.shape[1]
    for most, doubt, text_doubt in product(MOSTS, DOUBTS, TEXT_DOUBTS):
        made = planned(chain, most, doubt)
        made = Plan(made.tried[:, :width], made.carried[:, :width], made.taken[:, :width])
        text = costless(planned(texts, LONGEST, text_doubt))
        for share in SHARES:
            enough = expected(texts, text_doubt) >= share * expected(chain, doubt, most)[:, :width]
            settings = {"most": most, "doubt": doubt, "text doubt": text_doubt, "text share": share}
            for merge in {False, merging}:
                other = merged(made, text) if merge else made
                yield settings | {"merged": merge}, other.unless(text, (text.carried > 0) & enough)


def merged(chain: Plan, text: Plan) -> Plan:
    common = np.minimum(chain.taken, text.taken)
    return Plan(chain.tried, chain.carried + text.carried - common, np.maximum(chain.taken, text.taken))
