"""Log-probs of the reference policy. It never changes, so they are computed once for each text and then cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor

Compute = Callable[[Tensor, Tensor, int], Tensor]
"""(ids [n, L], attention mask [n, L], T) -> log-probs [n, T] of the last T tokens."""


class ReferenceLogProbs:
    """An LRU cache of log-probs by text.

    Args:
        alone: compute each row in a separate forward pass without padding. Its bits then depend only on the text, so
            a run without this cache, or a resumed one, computes the same. Otherwise new rows share a pass.
        max_mb: maximum size in MB (2^20 bytes); the least recently used texts are evicted first.
    """

    def __init__(self, *, alone: bool, max_mb: float = 256):
        self._alone = alone
        self._limit = int(max_mb * 2**20)
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._bytes = 0

    def __call__(self, ids: Tensor, mask: Tensor, keep: int, compute: Compute) -> tuple[Tensor, int]:
        """Log-probs [B, keep] of right-padded responses after left-padded prompts, 0 where padded.

        Args:
            ids, mask: token ids and attention mask [B, L]; the last `keep` columns are the response.
            compute: runs the reference policy.

        Returns:
            The log-probs, and the number of rows that were cached.
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
    """16 bytes that identify the tokens of a prompt and its response, and the response's length."""
    return blake2b(text.cpu().numpy().tobytes() + response.to_bytes(8, "little"), digest_size=16).digest()
