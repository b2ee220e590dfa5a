"""Model Runner V2: one request verifies a draft, the next continues behind it on the KV that the first one cached.

V2 draws with noise of its own, keyed by (seed, absolute position, token id); the seed is the row's key. A verify
request carries prompt + response + draft and returns, for every draft position, the token that V2 would draw there. So
the responses are those of plain decoding by this engine with the same keys, not those of the other engines.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from rollout.drafting.draft import Draft
from rollout.engines.response import refuse_unusable
from rollout.engines.vllm.rows import BUG, Rules, VLLMRow
from rollout.types import EngineStats, RolloutError
from rollout.verify import Drawn, Stood

_FEWEST = 4  # draft tokens that are worth a request
_STRETCH = 32  # tokens decoded before a diverged row's drafter is asked again; doubles each time it does not help


def draft_length(p: float, pass_s: float, token_s: float, rows: int, overhead: int, limit: int) -> int:
    """How many draft tokens a verify request should carry; 0 when decoding on is cheaper.

    A decoded token costs its share of a pass, pass_s / rows + token_s seconds; an accepted draft token saves that. The
    j-th draft token is accepted with probability p^j and costs token_s, the request itself `overhead` tokens.

    Args: p in (0, 1); rows: that share a pass; limit: tokens of the draft.
    """
    gain = pass_s / max(rows, 1) + token_s
    k = min(limit, int(math.log(token_s / gain) / math.log(p)))
    return k if p * (1 - p**k) / (1 - p) * gain > token_s * (k + overhead) else 0


@dataclass
class _Flight:
    """A request that vLLM works on."""

    row: VLLMRow
    draft: list[int]
    """Empty for a continuation."""
    cap: int


@dataclass(kw_only=True)
class TwoRequests(Rules):
    """Generates each response with verify requests and continuations, all in one step loop.

    Continuations go first: their KV is what a full cache would evict next.

    Args:
        context: most tokens of a prompt with its response.
        block: tokens of a KV block; a request computes all but a prefix's whole blocks again.
        scores_per_chunk: draft positions scored at a time; bounds the memory of their logits.
    """

    llm: LLM
    context: int
    block: int
    scores_per_chunk: int
    _flights: dict[str, _Flight] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _step_tokens: int = 0

    def __post_init__(self):
        self.llm.collective_rpc("specrl_install_v2", args=(self.scores_per_chunk,))
        executor = self.llm.llm_engine.engine_core.engine_core.model_executor
        execute = executor.execute_model

        def counting(scheduled, *args, **kwargs):
            self._step_tokens += scheduled.total_num_scheduled_tokens
            return execute(scheduled, *args, **kwargs)

        executor.execute_model = counting

    def run(self, rows: Sequence[VLLMRow], stop: Callable[[], bool]) -> EngineStats:
        """Finishes every row, unless `stop` says before a step that this is enough."""
        self.stats, engine = EngineStats(), self.llm.llm_engine
        try:
            for row in rows:
                self._next(row)
            while engine.has_unfinished_requests() and not stop():
                verifying = any(flight.draft for flight in self._flights.values())
                self._step_tokens, began = 0, time.perf_counter()
                outputs = engine.step()
                self._charge(time.perf_counter() - began, verifying)
                for output in outputs:
                    self._land(self._flights.pop(output.request_id), output)
        finally:
            engine.abort_request(list(self._flights))
            self._flights = {}
        if (unfinished := sum(row.finish is None for row in rows)) and not stop():
            raise RolloutError(f"vLLM left {unfinished} of {len(rows)} rows unfinished; {BUG}")
        return self.stats

    def _charge(self, seconds: float, verifying: bool) -> None:
        self.stats.passes += self._step_tokens > 0
        self.stats.forward_tokens += self._step_tokens
        if verifying:
            self.stats.verify_s += seconds
        else:
            self.stats.decode_s += seconds
        if self._step_tokens:
            self.drafting.observe_pass(self._step_tokens, seconds)

    # Requests out -------------------------------------------------------------------------------------------------

    def _next(self, row: VLLMRow) -> None:
        """Verifies a draft of the row's next tokens if that pays, else decodes on."""
        began = time.perf_counter()
        draft = self._draft(row) if row.drafting else []
        self.stats.draft_s += time.perf_counter() - began
        if draft:
            self._verify(row, draft)
            return
        cap = row.room
        if row.request.drafter is not None and row.drafting:
            row.stretch = 2 * row.stretch or _STRETCH
            cap = min(cap, row.stretch)
        self._send(_Flight(row, [], cap), priority=-1, stop_token_ids=list(row.sampling.eos_ids))

    def _draft(self, row: VLLMRow) -> list[int]:
        guess, budget = self.drafting.guess, self.drafting.budget
        if self.drafting.whole:
            return list(guess(row, min(row.room, self.context - 1 - len(row.request.prompt))))
        if budget.window:
            return list(guess(row, min(budget.window, row.room - 1)))
        draft = list(guess(row, row.room - 1))
        if not draft:
            return []
        pass_s, token_s = budget.cost()
        p = min(budget.acceptance(row.kind), 0.9999)
        k = draft_length(p, pass_s, token_s, len(self._flights) + 1, self.block, len(draft))
        return draft[:k] if k >= _FEWEST else []

    def _verify(self, row: VLLMRow, draft: list[int], skip_cache: bool = False) -> None:
        self._send(
            _Flight(row, draft, 1),
            priority=0,
            prompt_logprob_start=len(row.request.prompt) + len(row.tokens) - 1,
            prompt_logprob_token_ids=np.array(draft)[:, None],
            skip_reading_prefix_cache=skip_cache,
        )

    def _send(self, flight: _Flight, priority: int, **settings) -> None:
        request, name = flight.row.request, str(next(self._numbers))
        params = SamplingParams(
            temperature=flight.row.sampling.temperature,
            seed=request.key if request.key != -1 else 0,  # vLLM takes -1 for no seed
            max_tokens=flight.cap,
            ignore_eos=True,  # the model's own; the run's stop a continuation
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **settings,
        )
        prompt = {"prompt_token_ids": [*request.prompt, *flight.row.tokens, *flight.draft]}
        self.llm.llm_engine.add_request(name, prompt, params, priority=priority)
        self._flights[name] = flight

    # Results in ---------------------------------------------------------------------------------------------------

    def _land(self, flight: _Flight, output) -> None:
        row, done = flight.row, output.outputs[0]
        tokens, logprobs = list(done.token_ids), list(done.logprobs.logprobs)
        self._refuse_nan(logprobs)
        if not flight.draft:
            count = row.emit(Stood(tokens, logprobs, logprobs, 0), row.sampling.eos_ids)
            row.passes += count - 1
            self._note_pause(row, count)
            if count != len(tokens) or (row.finish is None and count != flight.cap):
                raise RolloutError(f"vLLM decoded {len(tokens)} of at most {flight.cap} tokens, {count} fit; {BUG}")
        elif output.prompt_token_id_logprobs is None:  # the cache held a scored position, which was not computed then
            self._verify(row, flight.draft, skip_cache=True)
            return
        else:
            tested, drawn, drawn_logp = output.prompt_token_id_logprobs.T.tolist()
            self._refuse_nan(tested)
            draft = Draft(flight.draft, row.guess.source, (row.request.draft_logprobs or ())[: len(flight.draft)])
            draws = [*map(int, drawn), *tokens]
            self.settle(row, draft, Drawn(len(row.tokens), draws, drawn_logp + logprobs, tested))
            row.drafting = not self.drafting.whole  # the published method drafts once
            row.stretch = 0 if row.state == "agreeing" else row.stretch
        if row.finish is None:
            self._next(row)

    def _note_pause(self, row: VLLMRow, passes: int) -> None:
        """Counts the passes that a row decoded although its drafter had a guess."""
        if row.guess.tokens:
            pass_s, token_s = self.drafting.budget.cost()
            self.stats.paused += passes
            self.stats.paused_acceptance += passes * self.drafting.budget.acceptance(row.kind)
            self.stats.paused_needed += passes * token_s / (pass_s / (len(self._flights) + 1) + token_s)

    def _refuse_nan(self, logprobs: Sequence[float]) -> None:
        refuse_unusable((logprob == logprob for logprob in logprobs), self.weight_version)
