"""A model at work on a batch of rows whose texts may also be written by someone else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.engines.ragged import Pass, RaggedKV, RaggedModel, chunks


@dataclass(frozen=True, slots=True)
class Fed:
    """What one pass says about the tokens fed to a row: lists with one entry per token, for the token after it."""

    start: int
    """Response position of the first draw."""
    draws: list[int]
    logprobs: list[float]
    """Of the draws."""
    text_logprobs: list[float]
    """Of the row's own next token; one fewer where the last token fed has none yet."""
    hidden: Tensor
    """Final hidden states [n, hidden] of the tokens fed."""
    usable: bool
    """False when some logits were NaN or infinite."""


class Session:
    """KV of one model for a batch of rows, of which any part may be behind: what a row lacks is fed when it is needed.

    Rolling back is forgetting how far a row was written; positions beyond are written over. A token costs the model one
    pass position however often other models took turns on the row.

    Args:
        model: runs the passes.
        prompts: token ids of each row's prompt, at least one each; their KV is computed at the first pass.
        keys: noise keys of the rows.
        tie_margin: draws closer than this are decided by a pass over the row's prefix alone, as the engine does.
    """

    def __init__(self, model: RaggedModel, prompts: Sequence[Sequence[int]], keys: Sequence[int], tie_margin: float):
        self.model, self._prompts, self._keys, self._tie_margin = model, list(prompts), list(keys), tie_margin
        self._written = [len(prompt) - 1 for prompt in prompts]
        self._kv: RaggedKV | None = None
        self.passes = self.forward_tokens = self.ties = 0

    def lacks(self, row: int, text: Sequence[int]) -> int:
        """How many tokens of the row, prompt included, the next pass feeds."""
        return len(self._prompts[row]) + len(text) - self._written[row]

    def feed(self, texts: dict[int, Sequence[int]], last: bool = True) -> dict[int, Fed]:
        """Feeds what each row lacks and draws after every token fed: the last draw continues the row.

        Args:
            texts: row -> its whole response so far; each row must lack at least one token that is fed.
            last: also feed the last token of each text; without, it is only scored, and the row still lacks it.

        Raises:
            ValueError: a row lacks nothing, such as one that was not rolled back to where its text changed.
        """
        if self._kv is None:
            self._kv, spent = self.model.prefill(self._prompts)
            self.forward_tokens += spent
        rows = sorted(texts)
        whole = {row: [*self._prompts[row], *texts[row]] for row in rows}
        fed: dict[int, Fed] = {}
        ends = {row: len(whole[row]) - (not last) for row in rows}
        lengths = [ends[row] - self._written[row] if row in whole else 0 for row in range(rows[0], rows[-1] + 1)]
        if not all(lengths[row - rows[0]] > 0 for row in rows):
            raise ValueError(f"rows that lack no token cannot be fed: {lengths}")
        for first, last in chunks(lengths, self.model.tokens_per_pass):
            fed |= self._pass(rows[0] + first, lengths[first:last], whole)
        for row in rows:
            self._written[row] = ends[row]
        return fed

    def rollback(self, row: int, length: int) -> None:
        """Forgets what was fed to the row beyond its first `length` response tokens."""
        self._written[row] = min(self._written[row], len(self._prompts[row]) + length)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the given rows, in that order."""
        columns = (self._prompts, self._keys, self._written)
        self._prompts, self._keys, self._written = ([column[row] for row in rows] for column in columns)
        if self._kv is not None:
            self._kv.select(torch.tensor(rows, device=self.model.device, dtype=torch.long))

    def _pass(self, first: int, lengths: Sequence[int], whole: dict[int, list[int]]) -> dict[int, Fed]:
        """One forward pass over the rows from `first` on that have a length."""
        tokens, targets, keys, at, starts = [], [], [], [], []
        for row, n in enumerate(lengths, start=first):
            start = self._written[row] if n else 0
            starts.append(start)
            if n:
                tokens += whole[row][start : start + n]
                targets += [*whole[row], 0][start + 1 : start + n + 1]
                keys += [self._keys[row]] * n
                at += [start + i + 1 - len(self._prompts[row]) for i in range(n)]
        hidden = self.model.forward(tokens, Pass(self._kv, first, starts, lengths, self.model.device))
        columns = self.model.draw(hidden, keys, at, targets)
        self.passes += 1
        self.forward_tokens += len(tokens)
        fed, i = {}, 0
        for row, n in enumerate(lengths, start=first):
            if n:
                draws, logprobs, text, gaps = (column[i : i + n] for column in columns)
                self._break_ties(row, whole[row], at[i : i + n], draws, logprobs, gaps)
                text = text[: len(whole[row]) - self._written[row] - 1]
                fed[row] = Fed(at[i], draws, logprobs, text, hidden[i : i + n], all(gap == gap for gap in gaps))
                i += n
        return fed

    def _break_ties(self, row: int, text: list[int], at: list[int], draws: list, logprobs: list, gaps: list) -> None:
        """Takes draws that rounding could flip from a pass whose shape depends on the row's prefix alone."""
        for i, gap in enumerate(gaps):
            if gap < self._tie_margin:
                prefix = text[: len(self._prompts[row]) + at[i]]
                layout = Pass(RaggedKV(1, len(prefix)), 0, [0], [len(prefix)], self.model.device)
                hidden = self.model.forward(prefix, layout)[-1:]
                (draws[i],), (logprobs[i],), _, _ = self.model.draw(hidden, [self._keys[row]], [at[i]])
                self.ties += 1
