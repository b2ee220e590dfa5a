"""How much the responses to a prompt differ from each other and from those of the last visit.

Drafts from old text must not make a policy repeat itself: under the exact rule they cannot, under a lossy one they can,
and a replayed key repeats text by design. These metrics show it where rewards would show it late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from specrl.rollout.reduction import Metric, mean
from specrl.rollout.types import Row

N = 4
_BASE = np.uint64(0x9E3779B97F4A7C15)


def ngrams(tokens: Sequence[int]) -> np.ndarray:
    """The distinct N-grams of a text as 64-bit hashes, sorted; empty for fewer than N tokens."""
    ids = np.asarray(tokens, np.uint64) + np.uint64(1)
    size = len(ids) - N + 1
    if size < 1:
        return np.empty(0, np.uint64)
    hashes = np.zeros(size, np.uint64)
    for i in range(N):
        hashes = hashes * _BASE + ids[i : i + size]
    return np.unique(hashes)


def diversity_metrics(
    rows: Sequence[Row], responses: Sequence[Sequence[int]], old: Sequence[Sequence[int] | None]
) -> dict[str, Metric]:
    """`diversity/distinct_4`, `diversity/group_overlap` and `diversity/old_overlap` of a batch (docs/metrics.md).

    Args:
        responses: token ids of each row.
        old: the stored response of each row's sample, None without one.
    """
    groups: dict[str, list[np.ndarray]] = defaultdict(list)
    common, sizes = 0.0, 0.0
    for row, tokens, before in zip(rows, responses, old, strict=True):
        grams = ngrams(tokens)
        groups[row.example_id].append(grams)
        if before is not None:
            earlier = ngrams(before)
            common += len(np.intersect1d(grams, earlier, assume_unique=True))
            sizes += (len(grams) + len(earlier)) / 2
    distinct, in_all, shared_by_pairs, pairs = 0, 0, 0.0, 0.0
    for texts in groups.values():
        _, counts = np.unique(np.concatenate(texts), return_counts=True)
        distinct += len(counts)
        total = int(counts.sum())
        in_all += total
        shared_by_pairs += float((counts * (counts - 1)).sum()) / 2
        pairs += total * (len(texts) - 1) / 2  # mean size of two texts, summed over all pairs
    metrics = {
        "diversity/distinct_4": mean(distinct, in_all),
        "diversity/group_overlap": mean(shared_by_pairs, pairs),
    }
    if sizes:
        metrics["diversity/old_overlap"] = mean(common, sizes)
    return metrics
