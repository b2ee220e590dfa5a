"""Log-probs of the reference policy, which never changes: a text that was seen before keeps its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor

Compute = Callable[[Tensor, Tensor, int], Tensor]
"""(ids [n, L], attention mask [n, L], T) -> log-probs [n, T] of the last T tokens."""


class ReferenceLogProbs:
    """The latest log-probs by text, bounded in memory.

    Args:
        alone: compute each row in a pass of its own, without padding. Its bits then depend on the text only, so a run
            without this memory, or a resumed one, computes the same. Otherwise the rows that are new share passes.
        max_mb: bound of what is kept, in MB (2^20 bytes); the least recently used texts go first.
    """

    def __init__(self, *, alone: bool, max_mb: float = 256):
        self._alone, self._limit = alone, int(max_mb * 2**20)
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._bytes = 0

    def __call__(self, ids: Tensor, mask: Tensor, keep: int, compute: Compute) -> tuple[Tensor, int]:
        """Log-probs [B, keep] of the responses in left-padded prompts plus right-padded responses, 0 where padded.

        Args:
            ids, mask: token ids and attention mask [B, L]; the last `keep` columns are the response.
            compute: the reference policy.

        Returns: the log-probs, and how many rows kept theirs.
        """
        marks = [_digest(row[seen.bool()], int(seen[-keep:].sum())) for row, seen in zip(ids, mask, strict=True)]
        new = [i for i, mark in enumerate(marks) if mark not in self._kept]
        out = torch.zeros(len(ids), keep, device=ids.device)
        for i in set(range(len(ids))) - set(new):
            known = self._kept[marks[i]]
            out[i, : len(known)] = known.to(out.device)
        for rows in [[i] for i in new] if self._alone else [new] * bool(new):
            seen = mask[rows].any(0).nonzero()
            first, end = int(seen[0]), int(seen[-1]) + 1
            if (length := keep - ids.shape[1] + end) > 0:
                out[rows, :length] = compute(ids[rows, first:end], mask[rows, first:end], length).float()
        out *= mask[:, -keep:]
        self._keep(marks, out, mask[:, -keep:].sum(1).tolist())
        return out, len(ids) - len(new)

    def _keep(self, marks: list[bytes], out: Tensor, lengths: list[int]) -> None:
        for mark, row, length in zip(marks, out.cpu(), lengths, strict=True):
            if mark not in self._kept:
                self._kept[mark] = row[:length].clone()
                self._bytes += length * 4
            self._kept.move_to_end(mark)
        while self._bytes > self._limit:
            self._bytes -= len(self._kept.popitem(last=False)[1]) * 4


def _digest(text: Tensor, response: int) -> bytes:
    """16 bytes that identify a prompt with its response, given as their tokens and the length of the latter."""
    return blake2b(text.cpu().numpy().tobytes() + response.to_bytes(8, "little"), digest_size=16).digest()
