"""What happens inside a step of vLLM's Model Runner V1: rows are drawn with this package's noise and drafts ride along.

A step carries each row's last token and its draft; `sample` decides about them in the place of vLLM's sampler, then
vLLM asks `propose` for the next drafts. Whose rows they are is a subclass's matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput

from rollout.drafting.draft import EMPTY, Draft
from rollout.engines.base import Sampling
from rollout.engines.response import refuse_unusable
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
        scores_per_step: most draft tokens of all rows in one step, as vLLM holds the logits of all of them at once.
        scores_per_chunk: positions drawn at a time; bounds the memory of the noise.
        tie_margin: gaps below it are counted.
    """

    draft_tokens: int
    scores_per_step: int
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
        unfinished = runner.discard_request_mask.np  # prompts of which this step computed only a part
        rows = [None if unfinished[i] else self.row(runner, name) for i, name in enumerate(ids)]
        tested = [self._tested(row, draft) if row else EMPTY for row, draft in zip(rows, drafts, strict=True)]
        self._step.tokens, self._step.drafted = int(runner.query_start_loc.np[len(ids)]), sum(map(len, drafts))
        self._step.decoding = any(row.tokens for row in rows if row)
        index, keys, at, targets, laws, places, first = [], [], [], [], [], [], 0
        for row, count, draft, test in zip(rows, counts, drafts, tested, strict=True):
            if row:
                n = len(draft) + 1
                index += range(first, first + n)
                keys += [row.request.key] * n
                at += range(len(row.tokens), len(row.tokens) + n)
                targets += [*test.tokens, 0][:n]
                laws += [row.sampling] * n
            places.append(first)
            first += count + 1
        drawn = self._score(logits, index, keys, at, targets, laws)
        emitted, first = torch.full((len(ids), max(counts) + 1), -1, dtype=torch.int32), 0
        for i, (row, draft, test) in enumerate(zip(rows, drafts, tested, strict=True)):
            if row is None:
                emitted[i, 0] = 0  # vLLM drops it, or ends a scored request with it
                continue
            *columns, gaps = (column[first : first + len(draft) + 1] for column in drawn)
            count = self.settle(row, test, Drawn(len(row.tokens), *columns, states=(self.hidden, places[i])))
            # On a CPU one thread computes a position's logits bit for bit the same in every step, so near ties need no
            # arbiter; elsewhere their number says how often rounding could have decided.
            self.stats.ties += sum(gap < self.tie_margin for gap in gaps[:count])
            emitted[i, :count] = torch.tensor(row.tokens[-count:], dtype=torch.int32)
            first += len(draft) + 1
        return SamplerOutput(sampled_token_ids=emitted.to(logits.device), logprobs_tensors=None)

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
        share = min(self.draft_tokens, self.scores_per_step // max(1, len(waiting)))
        if not self.drafting.whole:
            for row, draft in zip(waiting, self.drafting.propose(waiting, self.stats), strict=True):
                row.draft = draft
        return [self._draft(row, share) if row else [] for row in rows]

    def _draft(self, row: VLLMRow, share: int) -> list[int]:
        if self.drafting.whole:
            n = len(row.tokens)
            return list(row.text.tokens[n : n + min(share, row.room - 1)]) if row.drafting else []
        return list(row.draft.tokens[:share])

    def _tested(self, row: VLLMRow, draft: list[int]) -> Draft:
        """What is decided about: the draft that rode, and under the lenient rule the next token of its text."""
        if not self.drafting.whole:
            return row.draft.first(len(draft))
        first, last = len(row.tokens), len(row.tokens) + len(draft) + 1
        text = row.text if row.drafting else EMPTY
        return Draft([*draft, *text.tokens[last - 1 : last]], text.source, (text.logprobs or ())[first:last])

    def _score(self, logits: Tensor, index, keys, at, targets, laws: list[Sampling]) -> tuple[list, list, list, list]:
        """Draws, log-probs of draws and of targets, and gaps, as lists [N]; noise exists only chunk by chunk."""
        if not index:
            return [], [], [], []
        index, keys, at, targets = (torch.tensor(x, device=logits.device) for x in (index, keys, at, targets))
        parts, order = [], []
        for law, chosen in by_law(laws, self.scores_per_chunk):
            order += chosen
            part = torch.tensor(chosen, device=logits.device)
            terms = {"temperature": law.temperature, "top_k": law.top_k, "top_p": law.top_p}
            parts.append(self.draw(logits[index[part]], keys[part], at[part], targets[part], **terms))
        back = torch.tensor(order, device=logits.device).argsort()
        drawn = tuple(torch.cat(column)[back].tolist() for column in zip(*parts, strict=True))
        refuse_unusable((gap == gap for gap in drawn[3]), self.weight_version)
        return drawn


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


def lift_limit(runner) -> None:
    """Lets rows draft up to the end of the context.

    Drafts end before the row's cap, so they always fit. vLLM's own check would answer a row near the end of the context
    with made-up drafts for the whole batch.
    """
    runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens


def _split(tokens: list[int], counts: Sequence[int]) -> list[list[int]]:
    """The drafts that vLLM fed, row by row: it shortens what was proposed, and pads rows that join with ids of -1."""
    fed = iter(tokens)
    rows = ([next(fed) for _ in range(count)] for count in counts)
    return [row[: row.index(-1)] if -1 in row else row for row in rows]
