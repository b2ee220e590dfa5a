"""Model Runner V1: a response is one request, drafts ride in it, and this package's own noise draws its tokens.

vLLM's worker lives in the driver's process, so rows, drafters and budget are plain shared objects. A step carries each
row's last token and its draft; `sample` decides about them in the place of vLLM's sampler, then vLLM asks `propose` for
the next drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType

import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.outputs import SamplerOutput

from rollout.drafters.contexts import ContextTable
from rollout.engines.rows import ask_all
from rollout.engines.vllm_rows import BUG, Rules, VLLMRow
from rollout.noise import keyed_draw
from rollout.types import EngineStats, Request, RolloutError


@dataclass
class _Step:
    """What the last engine step did, for the accounting."""

    tokens: int = 0
    drafted: int = 0
    decoding: bool = False
    draft_s: float = 0.0


@dataclass(kw_only=True)
class OneRequest(Rules):
    """Generates each response with one request.

    The last position of a row has no draft token behind it. The lenient rule, which decides about its draft's tokens
    and not about draws, uses it for the token that comes next; so it also decides about the first token.

    Args:
        contexts: the texts of all prompts, where rows may draft from them.
        draft_tokens: most draft tokens of a row in one step.
        scores_per_step: most draft tokens of all rows in one step, as vLLM holds the logits of all of them at once.
        scores_per_chunk: positions drawn at a time; bounds the memory of the noise.
        tie_margin: gaps below it are counted.
    """

    llm: LLM
    contexts: ContextTable | None
    draft_tokens: int
    scores_per_step: int
    scores_per_chunk: int
    tie_margin: float
    draw: Callable = keyed_draw
    _rows: dict[str, VLLMRow] = field(default_factory=dict)
    """By vLLM's own request id; other requests are scored, not sampled."""
    _step: _Step = field(default_factory=_Step)

    def __post_init__(self):
        self.llm.collective_rpc("specrl_install_v1", args=(self,))

    def install(self, runner) -> None:
        """Puts itself into the model runner; the worker extension calls it."""
        runner._sample = MethodType(self.sample, runner)
        runner.drafter.propose = MethodType(self.propose, runner)
        # Drafts end before the row's cap, so they always fit. vLLM's own check would answer a row near the end of the
        # context with made-up drafts for the whole batch.
        runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens

    # The driver's loop --------------------------------------------------------------------------------------------

    def run(self, rows: Sequence[VLLMRow]) -> EngineStats:
        """Finishes every row."""
        self.stats, engine, outputs = EngineStats(), self.llm.llm_engine, {}
        try:
            for i, row in enumerate(rows):
                if self.lenient:
                    row.text = row.ask(row.room, self.vocab)
                self._rows[self._submit(str(i), row.request)] = row
            while engine.has_unfinished_requests():
                self._step, began = _Step(), time.perf_counter()
                outputs |= {int(output.request_id): output.outputs[0] for output in engine.step()}
                self._charge(time.perf_counter() - began)
        except BaseException:
            engine.abort_request(list(self._rows), internal=True)
            raise
        finally:
            self._rows = {}
        for i, row in enumerate(rows):
            theirs = (list(outputs[i].token_ids), outputs[i].finish_reason) if i in outputs else None
            if theirs != (row.tokens, row.finish):
                raise RolloutError(
                    f"vLLM and specrl disagree about row {i}: {theirs}, {(row.tokens, row.finish)}; {BUG}"
                )
        return self.stats

    def _submit(self, name: str, request: Request) -> str:
        """Hands a request to vLLM; returns vLLM's own id of it."""
        params = SamplingParams(
            temperature=0.0,  # `sample` decides; a greedy request carries the least state
            max_tokens=request.max_new_tokens,
            stop_token_ids=list(self.sampling.eos_ids),
            ignore_eos=True,  # the model's own; the run's are above
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(request.prompt)}, params)

    def _charge(self, seconds: float) -> None:
        stats, step = self.stats, self._step
        seconds -= step.draft_s
        stats.passes += 1
        stats.forward_tokens += step.tokens
        stats.draft_s += step.draft_s
        if step.drafted:
            stats.verify_s += seconds
        elif step.decoding:
            stats.decode_s += seconds
        else:
            stats.prefill_s += seconds
        if step.decoding:
            self.budget.observe_pass(step.tokens, seconds)

    # Inside vLLM's step -------------------------------------------------------------------------------------------

    def sample(self, runner, logits: Tensor, metadata) -> SamplerOutput:
        """Decides every row's next tokens from logits [drafts + rows, V], a row's positions together and in order."""
        ids = runner.input_batch.req_ids
        counts = metadata.num_draft_tokens if metadata else [0] * len(ids)
        drafts = _split(metadata.draft_token_ids.tolist() if metadata else [], counts)
        unfinished = runner.discard_request_mask.np  # prompts of which this step computed only a part
        rows = [None if unfinished[i] else self._rows.get(id_) for i, id_ in enumerate(ids)]
        tested = [self._tested(row, draft) if row else [] for row, draft in zip(rows, drafts, strict=True)]
        self._step.tokens, self._step.drafted = int(runner.query_start_loc.np[len(ids)]), sum(map(len, drafts))
        self._step.decoding = any(row.tokens for row in rows if row)
        index, keys, at, targets, first = [], [], [], [], 0
        for row, count, draft, test in zip(rows, counts, drafts, tested, strict=True):
            if row:
                n = len(draft) + 1
                index += range(first, first + n)
                keys += [row.request.key] * n
                at += range(len(row.tokens), len(row.tokens) + n)
                targets += [*test, 0][:n]
            first += count + 1
        drawn = self._score(logits, index, keys, at, targets)
        emitted, first = torch.full((len(ids), max(counts) + 1), -1, dtype=torch.int32), 0
        for i, (row, draft, test) in enumerate(zip(rows, drafts, tested, strict=True)):
            if row is None:
                emitted[i, 0] = 0  # vLLM drops it, or ends a scored request with it
                continue
            draws, logp, logp_tested, gaps = (column[first : first + len(draft) + 1] for column in drawn)
            count = self.settle(row, test, draws, logp, logp_tested)
            # On a CPU one thread computes a position's logits bit for bit the same in every step, so near ties need no
            # arbiter; elsewhere their number says how often rounding could have decided.
            self.stats.ties += sum(gap < self.tie_margin for gap in gaps[:count])
            emitted[i, :count] = torch.tensor(row.tokens[-count:], dtype=torch.int32)
            first += len(draft) + 1
        return SamplerOutput(sampled_token_ids=emitted.to(logits.device), logprobs_tensors=None)

    def propose(self, runner, sampled: list[list[int]], *_, **__) -> list[list[int]]:
        """The draft that rides in each row's next step."""
        began = time.perf_counter()
        rows = [self._rows.get(id_) for id_ in runner.input_batch.req_ids]
        rows = [row if row and new and row.finish is None else None for row, new in zip(rows, sampled, strict=True)]
        waiting = [row for row in rows if row]
        share = min(self.draft_tokens, self.scores_per_step // max(1, len(waiting)))
        if not self.lenient:
            ask_all(waiting, self.budget, self.vocab, self.stats, self.contexts)
        drafts = [self._draft(row, share) if row else [] for row in rows]
        self._step.draft_s = time.perf_counter() - began
        return drafts

    def _draft(self, row: VLLMRow, share: int) -> list[int]:
        if self.lenient:
            n = len(row.tokens)
            return row.text[n : n + min(share, row.room - 1)] if row.drafting else []
        return row.draft[:share]

    def _tested(self, row: VLLMRow, draft: list[int]) -> list[int]:
        """The tokens to decide about: the draft's, and under the lenient rule the next one of its text."""
        at = len(row.tokens) + len(draft)
        return draft + row.text[at : at + 1] if row.drafting else draft

    def _score(self, logits: Tensor, index, keys, at, targets) -> tuple[list, list, list, list]:
        """Draws, log-probs of draws and of targets, and gaps, as lists [N]; noise exists only chunk by chunk."""
        if not index:
            return [], [], [], []
        index, keys, at, targets = (torch.tensor(x, device=logits.device) for x in (index, keys, at, targets))
        law = {"temperature": self.sampling.temperature, "top_k": self.sampling.top_k, "top_p": self.sampling.top_p}
        parts = []
        for i in range(0, len(index), self.scores_per_chunk):
            part = slice(i, i + self.scores_per_chunk)
            parts.append(self.draw(logits[index[part]], keys[part], at[part], targets[part], **law))
        drawn = tuple(torch.cat(column).tolist() for column in zip(*parts, strict=True))
        self.refuse_nan(drawn[3])
        return drawn


def _split(tokens: list[int], counts: list[int]) -> list[list[int]]:
    """The drafts that vLLM fed, row by row: it shortens what was proposed, and pads rows that join with ids of -1."""
    fed = iter(tokens)
    rows = ([next(fed) for _ in range(count)] for count in counts)
    return [row[: row.index(-1)] if -1 in row else row for row in rows]
