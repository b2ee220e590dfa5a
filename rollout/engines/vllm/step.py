"""What happens inside a step of vLLM's Model Runner V1: rows are drawn with this package's noise and drafts ride along.

A step carries each row's last token and its draft; `sample` decides about them in the place of vLLM's sampler, then
vLLM asks `propose` for the next drafts. Whose rows they are is a subclass's matter. V2 (native.py) has hooks of its own
around the same `ask` and `settle`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput

from rollout.drafting.draft import EMPTY, Draft
from rollout.engines.base import Sampling
from rollout.engines.response import refuse_unusable
from rollout.engines.vllm.room import Room
from rollout.engines.vllm.rows import Rules, VLLMRow
from rollout.noise import keyed_draw
from rollout.verify import Drawn


@dataclass
class Step:
    """What the last engine step did, for the accounting."""

    tokens: int = 0
    drafted: int = 0
    decoding: bool = False
    draft_s: float = 0.0


@dataclass(kw_only=True)
class StepRules(Rules):
    """Draws and drafts for the rows of a step.

    The last position of a row has no draft token behind it. The lenient rule, which decides about its draft's tokens
    and not about draws, uses it for the token that comes next; so it also decides about the first token.

    Args:
        draft_tokens: most draft tokens of a row in one step.
        room: draft tokens of all rows in one step; those that have drafts share it.
        scores_per_chunk: positions drawn at a time; bounds the memory of the noise.
        tie_margin: gaps below it are counted.
    """

    draft_tokens: int
    room: Room
    scores_per_chunk: int
    tie_margin: float = 0.0
    draw: Callable = keyed_draw
    hidden: Tensor | None = None
    """Final hidden states of a step's logits, in their order, if the rule reads them."""
    _step: Step = field(default_factory=Step)

    def row(self, runner, name: str) -> VLLMRow | None:
        """The row of vLLM's request `name`; None for requests that this package does not draw."""
        raise NotImplementedError

    def sample(self, runner, logits: Tensor, metadata) -> SamplerOutput:
        """Decides every row's next tokens from logits [drafts + rows, V], a row's positions together and in order."""
        ids = runner.input_batch.req_ids
        counts = metadata.num_draft_tokens if metadata else [0] * len(ids)
        drafts = _split(metadata.draft_token_ids.tolist() if metadata else [], counts)
        unfinished = runner.discard_request_mask.np[: len(ids)].tolist()  # this step computed a part of their prompts
        rows = [None if part else self.row(runner, name) for part, name in zip(unfinished, ids, strict=True)]
        tested = [self._tested(row, draft) if row else EMPTY for row, draft in zip(rows, drafts, strict=True)]
        self._step.tokens, self._step.drafted = int(runner.query_start_loc.np[len(ids)]), sum(map(len, drafts))
        self._step.decoding = any(row.tokens for row in rows if row)
        sizes = np.array([len(draft) + 1 if row else 0 for row, draft in zip(rows, drafts, strict=True)])
        held = np.array(counts) + 1
        draws, logprobs, of_targets, gaps = self._score(logits, held, sizes, rows, tested)
        emitted: list[Sequence[int]] = []
        first = 0
        places = (held.cumsum() - held).tolist()
        for row, test, size, place in zip(rows, tested, sizes.tolist(), places, strict=True):
            if row is None:
                emitted.append([0])  # vLLM drops it, or ends a scored request with it
                continue
            part = slice(first, first + size)
            columns, states = (draws[part], logprobs[part], of_targets[part]), (self.hidden, place)
            count = self.settle(row, test, Drawn(len(row.tokens), *columns, states=states))
            emitted.append(row.tokens[-count:])
            first += size
        # On a CPU one thread computes a position's logits bit for bit the same in every step, so near ties need no
        # arbiter; elsewhere their number says how often rounding could have decided.
        close = gaps < self.tie_margin
        if close.any():
            self.stats.ties += int(close[_ranges(sizes.cumsum() - sizes, np.minimum(sizes, _lengths(emitted)))].sum())
        return SamplerOutput(
            sampled_token_ids=torch.from_numpy(_table(emitted, max(counts) + 1)).to(logits.device),
            logprobs_tensors=None,
        )

    def propose(self, runner, sampled: list[list[int]], *_, **__) -> list[list[int]]:
        """The draft that rides in each row's next step."""
        began = time.perf_counter()
        rows = [
            self.row(runner, name) if new else None
            for name, new in zip(runner.input_batch.req_ids, sampled, strict=True)
        ]
        rows = [row if row and row.finish is None else None for row in rows]
        drafts = self.ask(rows)
        self._step.draft_s = time.perf_counter() - began
        return drafts

    def ask(self, rows: Sequence[VLLMRow | None]) -> list[list[int]]:
        """The draft tokens that each row carries next; none for None."""
        waiting = [row for row in rows if row]
        if not self._step.decoding:
            self.room.renew()
        if not self.drafting.whole:
            for row, draft in zip(waiting, self.drafting.propose(waiting, self.stats), strict=True):
                row.draft = draft
        drafts = [self._draft(row) if row else [] for row in rows]
        share = self.room.share(sum(map(bool, drafts)), len(waiting), self.draft_tokens)
        return [draft[:share] for draft in drafts]

    def _draft(self, row: VLLMRow) -> list[int]:
        if self.drafting.whole:
            n = len(row.tokens)
            return list(row.text.tokens[n : n + min(self.draft_tokens, row.room - 1)]) if row.drafting else []
        return list(row.draft.tokens)

    def _tested(self, row: VLLMRow, draft: list[int]) -> Draft:
        """What is decided about: the draft that rode, and under the lenient rule the next token of its text."""
        if not self.drafting.whole:
            tested = row.draft.first(len(draft))
            return tested if tested.tokens == draft else Draft(draft, row.draft.source)  # what was fed is what counts
        first, last = len(row.tokens), len(row.tokens) + len(draft) + 1
        text = row.text if row.drafting else EMPTY
        return Draft([*draft, *text.tokens[last - 1 : last]], text.source, (text.logprobs or ())[first:last])

    def _score(
        self, logits: Tensor, held: np.ndarray, sizes: np.ndarray, rows: Sequence[VLLMRow | None], tested: list[Draft]
    ) -> tuple[list[int], list[float], list[float], np.ndarray]:
        """Draws, their log-probs and those of the targets, and gaps, of N positions; noise exists chunk by chunk.

        Args: held, sizes: int [rows], positions of each row in the logits, and of them those that are drawn: N in sum.
        """
        if not sizes.any():
            return [], [], [], np.empty(0)
        drawn = [row for row in rows if row]
        of_drawn, firsts = sizes[sizes > 0], sizes.cumsum() - sizes
        where = np.zeros((4, sizes.sum()), dtype=np.int64)
        index, keys, at, targets = where
        index[:] = _ranges(held.cumsum() - held, sizes)
        keys[:] = np.repeat(np.array([row.request.key for row in drawn], dtype=np.int64), of_drawn)
        at[:] = _ranges(np.array([len(row.tokens) for row in drawn]), of_drawn)
        texts = [test.tokens for test in tested]
        targets[_ranges(firsts, _lengths(texts))] = _flat(texts)
        index, keys, at, targets = torch.from_numpy(where).to(logits.device)
        parts, order = [], []
        for law, chosen in _by_law_of_rows([row.sampling for row in drawn], of_drawn, self.scores_per_chunk):
            order.append(chosen)
            part = torch.from_numpy(chosen).to(logits.device)
            terms = {"temperature": law.temperature, "top_k": law.top_k, "top_p": law.top_p}
            columns = self.draw(logits[index[part]], keys[part], at[part], targets[part], **terms)
            parts.append(torch.stack([column.double() for column in columns]))  # exact: ids are below 2^53
        found = np.empty((4, sizes.sum()))
        found[:, np.concatenate(order)] = torch.cat(parts, 1).cpu().numpy()
        draws, logprobs, of_targets, gaps = found
        refuse_unusable([not np.isnan(gaps).any()], self.weight_version)
        return draws.astype(np.int64).tolist(), logprobs.tolist(), of_targets.tolist(), gaps


def keep_hidden(runner, flow: StepRules) -> None:
    """Lets the rule see what vLLM computes the logits of a step from."""
    compute = runner.model.compute_logits

    def compute_logits(hidden_states: Tensor, *more, **others) -> Tensor | None:
        flow.hidden = hidden_states
        return compute(hidden_states, *more, **others)

    if flow.drafting.reads_states:
        runner.model.compute_logits = compute_logits


def by_law(laws: Sequence[Sampling], most: int) -> Iterator[tuple[Sampling, list[int]]]:
    """The places of each law, at most `most` at a time."""
    for law in dict.fromkeys(laws):
        places = [i for i, other in enumerate(laws) if other == law]
        yield from ((law, places[i : i + most]) for i in range(0, len(places), most))


def _by_law_of_rows(laws: Sequence[Sampling], sizes: np.ndarray, most: int) -> Iterator[tuple[Sampling, np.ndarray]]:
    """As `by_law` for rows of `sizes` places each: the places as int64."""
    alike = all(law is laws[0] for law in laws)  # as those of one rollout are
    for law in [laws[0]] if alike else dict.fromkeys(laws):
        of_law = np.ones(len(laws), dtype=bool) if alike else np.array([other == law for other in laws])
        places = np.flatnonzero(np.repeat(of_law, sizes))
        yield from ((law, places[i : i + most]) for i in range(0, len(places), most))


def lift_limit(runner) -> None:
    """Lets rows draft up to the end of the context.

    Drafts end before the row's cap, so they always fit. vLLM's own check would answer a row near the end of the context
    with made-up drafts for the whole batch.
    """
    runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens


def _split(tokens: list[int], counts: Sequence[int]) -> list[list[int]]:
    """The drafts that vLLM fed, row by row: it shortens what was proposed, and pads rows that join with ids of -1."""
    ends = [*accumulate(counts)]
    rows = [tokens[end - count : end] for end, count in zip(ends, counts, strict=True)]
    return [row[: row.index(-1)] if -1 in row else row for row in rows] if -1 in tokens else rows


def _ranges(firsts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """firsts[0], firsts[0] + 1, ..., sizes[0] numbers, then those from firsts[1] on, and so on."""
    return np.repeat(firsts - sizes.cumsum() + sizes, sizes) + np.arange(sizes.sum())


def _lengths(lists: Sequence[Sequence[int]]) -> np.ndarray:
    return np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))


def _flat(lists: Sequence[Sequence[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(lists), dtype=np.int64)


def _table(lists: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """int32 [rows, width] with a list in each row, and -1 behind it."""
    table = np.full((len(lists), width), -1, dtype=np.int32)
    table[np.arange(width) < _lengths(lists)[:, None]] = _flat(lists)
    return table
