"""The rows of a step, the positions that it verifies, and the log-probs of its tokens. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specrl.rollout.drafting.budget import State
from specrl.rollout.drafting.draft import EMPTY, Draft
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.response import Response

BUG = "this is a bug in specrl, or a version of vLLM that it does not know"


@dataclass(slots=True, eq=False)
class VLLMRow(Response):
    """One response in the making. Under the exact rule every column but `tokens` is filled when it ends."""

    sampling: SamplingParams = field(kw_only=True)
    draft: Draft = EMPTY
    """Proposed for the row's next step."""
    old_text: Draft = EMPTY
    """The one draft that the lenient rule verifies, by response position."""
    offset: int = 0
    """Index of its first token in `LogprobBuffer`."""
    by_model: Sequence[int] = ()
    """What vLLM's draft model proposed for the next step, verified or not."""
    model_state: State = "start"
    """How much of that proposal was right."""


class LogprobBuffer:
    """Log-probs of the tokens of all rows under the exact rule, and whether each was drafted.

    A step writes all positions that it sampled. Rejected positions are overwritten by a later step.
    """

    def __init__(self, rows: Sequence[VLLMRow]):
        size = 0
        for row in rows:
            row.offset = size
            size += row.request.max_new_tokens
        self.logprobs = np.empty(size, np.float32)
        self.reused = np.empty(size, bool)

    def complete(self, row: VLLMRow) -> None:
        """Fills the columns of a row that has ended."""
        part = slice(row.offset, row.offset + len(row.tokens))
        row.logprobs = self.logprobs[part].tolist()
        row.behaviour = self.logprobs[part].tolist()
        row.reused = self.reused[part].tolist()


class StepBatch:
    """The rows of a step, with arrays that are cached while the batch is unchanged.

    Args: rows: None for requests that are not sampled in this step.
    """

    def __init__(self, rows: Sequence[VLLMRow | None]):
        self.rows = rows
        self.active = [row for row in rows if row]
        self.missing = [i for i, row in enumerate(rows) if row is None]
        sampling = [row.sampling for row in self.active]
        self.sampling = sampling if len({*sampling}) > 1 else sampling[:1]
        """Sampling params of each active row; a single entry applies to all of them."""
        self.eos_ids = np.array([*{token for params in sampling for token in params.eos_ids}], np.int32).reshape(-1, 1)
        self.num_tokens = np.array([row.request.position + len(row.tokens) for row in self.active], np.int64)
        """Response position of each active row's next token."""
        self.columns = np.zeros((4, len(self.active)), np.int64)
        """One column for each active row, which `VerifyInputs.columns` repeats for each of its positions."""
        self.columns[0] = [row.offset - row.request.position for row in self.active]
        self.columns[1] = [row.request.key for row in self.active]


class VerifyInputs:
    """The positions of a step at which logits are computed: each row's last token, then its draft.

    Args:
        counts: int64 [R], draft tokens of each row, vLLM's padding included.
        tokens: int32, all these tokens in order; -1 is padding.
    """

    def __init__(self, batch: StepBatch, counts: np.ndarray, tokens: np.ndarray):
        self.batch = batch
        self.sizes = counts + 1
        """Int64 [R], positions of each row without padding; 0 where there is no row."""
        ends = self.sizes.cumsum()
        self.starts = ends - self.sizes
        """Int64 [R], each row's first position."""
        last = np.zeros(ends[-1], bool)
        last[ends - 1] = True
        self.next_draft = np.empty(ends[-1], np.int32)
        """Int32 [N], the draft token that follows each position; -1 where there is none."""
        self.next_draft[last] = -1
        self.next_draft[~last] = tokens
        self.drafted = len(tokens)
        self.dense = not batch.missing and tokens.min(initial=0) == 0
        """Every position belongs to a row: there is no padding, and no request of others."""
        self.sampled: slice | np.ndarray = slice(None)
        """Index of the M positions that are sampled here, of N."""
        sizes, starts = self.sizes, self.starts
        if not self.dense:
            padding = tokens < 0
            self.drafted -= int(padding.sum())
            self.sizes -= np.bincount(np.arange(len(counts)).repeat(counts)[padding], minlength=len(counts))
            self.sizes[batch.missing] = 0
            self.sampled = ranges(self.starts, self.sizes)
            sizes = self.sizes[self.sizes > 0]
            starts = sizes.cumsum() - sizes
        batch.columns[2] = batch.num_tokens - starts
        self.columns = batch.columns.repeat(sizes, 1)
        """Int64 [4, M]: offset of the row in the buffer, noise key, response position, token to score."""
        self.columns[2] += np.arange(self.columns.shape[1])


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ..., sizes[0] numbers, then those from starts[1] on, and so on."""
    ends = sizes.cumsum()
    return np.repeat(starts - ends + sizes, sizes) + np.arange(ends[-1])


def padded(tokens: np.ndarray, starts: np.ndarray, sizes: np.ndarray, width: int) -> np.ndarray:
    """[R, width] with `sizes[i]` of the tokens [N > 0], from starts[i] on, in row i, and -1 after them."""
    column = np.arange(width)
    rows = tokens.take(starts[:, None] + column, mode="clip")
    rows[column >= sizes[:, None]] = -1
    return rows
