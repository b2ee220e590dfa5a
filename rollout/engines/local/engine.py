"""The transformers engine: plain and speculative decoding of packed batches with the trainer's own model.

A row gets a slab of KV memory and its prompt is prefilled (once per distinct prompt). Then every pass carries the row's
last token and a draft of the next ones, samples a token after each of them, and the row emits what the acceptance rule
accepts; the KV of rejected tokens lies behind the row's end, where attention does not see it, until later tokens
overwrite it. A row without a draft carries one token. Rows that finish leave their slabs to rows that wait, and at last
to rows of the next batch, which stop when the batch has ended.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.draft import Draft
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.base import (
    DRAFTER,
    NO_WEIGHTS,
    Engine,
    Probe,
    SamplingParams,
    gc_frozen,
    out_of_memory,
)
from specrl.rollout.engines.filling import FillsPasses, chosen_fill, joining
from specrl.rollout.engines.local.memory import max_concurrent_rows, row_tokens
from specrl.rollout.engines.local.model import InFlightPass, PackedModel, base_model
from specrl.rollout.engines.local.probe import packed_model
from specrl.rollout.engines.local.reader import Reader, Session
from specrl.rollout.engines.response import Response, check_request, refuse_unusable
from specrl.rollout.engines.weights import WeightCheck
from specrl.rollout.types import AheadText, Completion, EngineStats, Request, RolloutError
from specrl.rollout.verify import AcceptanceRule, exact

log = logging.getLogger(__name__)

TIE_MARGIN = 1e-4
"""Score gap below which a separate pass decides between two tokens, in float32 only."""
OVERLAP = 128
"""Rows from which on two passes of half of them, during which the host works, should take less time than one pass. By
arithmetic only (an H100 reads 1.7 billion weights in 1 ms, the host takes 1 to 6 ms); `benchmarks.gpu` measures it."""


@dataclass(slots=True)
class Cohort:
    """Rows whose passes follow one another."""

    rows: dict[int, Response] = field(default_factory=dict)
    """By number."""
    drafts: dict[int, Draft] = field(default_factory=dict)
    """Of the passes in flight."""
    in_flight: list[InFlightPass] = field(default_factory=list)


class TransformersEngine(FillsPasses):
    """Generates with any decoder-only causal LM of transformers that uses its attention interface.

    No KV outlives a `generate` call, or the session around several, so nothing stale can be served.

    Args:
        model: a decoder-only causal LM, or a peft model around one; the trainer's own unless `own_weights`.
        sampling: the sampling params.
        rule: decides which draft tokens are accepted.
        drafting: proposes drafts; by default from the requests' own drafters.
        limits: the options of `rollout`.
        own_weights: the model is not the trainer's, so updates carry tensors.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: SamplingParams,
        rule: AcceptanceRule = exact,
        drafting: Drafting | None = None,
        limits: RolloutConfig | None = None,
        own_weights: bool = False,
    ):
        if any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values()):
            raise RolloutError("adapters that learn a prompt are not in the model's own layers; use LoRA instead")
        self.model = base_model(model)
        self.policy = packed_model(self.model, sampling, limits)
        self.sampling = sampling
        self.limits = self.policy.limits
        self.vocab = self.policy.vocab
        self.context = self.policy.context
        self.limit = self.policy.limit
        self.tie_margin = TIE_MARGIN if self.policy.dtype == torch.float32 else 0.0
        """See TIE_MARGIN."""
        self.weight_version = 0
        self.fault = ""
        """Why nothing can be generated with these weights."""
        self.own_weights = own_weights
        self.rule = rule
        self.drafting = drafting or Drafting()
        self._session: Session | None = None
        self._max_rows = self.limits.rows_per_batch  # rows at a time that are known to fit
        self._last_settled = 0.0  # when the last pass was settled
        super().__init__()
        self.drafting.attach(self.policy)
        on_cpu = self.device.type == "cpu"
        self.fill = chosen_fill(self.limits.fill, lambda tokens: self.policy.timing(tokens, tokens)[1], on_cpu)

    def generate(self, requests: Sequence[Request]) -> tuple[list[Completion], EngineStats]:
        """See Engine.generate. Prompts need at least one token and must fit the model's context with the response."""
        rows, stats = self._rows(requests), EngineStats()
        ahead = self._rows(self.take_announced(), len(rows))
        self.drafting.begin(requests)
        self._run(rows, stats, ahead)
        self.drafting.end(rows, stats)
        self.keep(ahead)
        return [row.completion(self.weight_version) for row in rows], stats

    def ahead(self, requests: Sequence[Request], stop: Callable[[], bool]) -> list[AheadText]:
        """Responses as far as they are decoded when `stop`, which is asked before each pass, returns true.

        Drafting learns nothing from these texts, as they will be generated again.
        """
        rows = self._rows(requests)
        with self.policy.until(stop):
            self._run(rows, EngineStats())
        return [AheadText(row.tokens, row.finish) for row in rows]

    @property
    def device(self) -> torch.device:
        return self.policy.device

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]] | None, version: int, probe: Probe | None = None
    ) -> None:
        """See Engine.update_weights. A model that is shared with the trainer only records the version."""
        if version < self.weight_version:
            raise RolloutError(f"weight version {version} is older than the engine's {self.weight_version}")
        self.fault = f"the update to weight version {version} failed"
        if weights is not None:
            self._load(weights)
        elif self.own_weights:
            raise RolloutError(NO_WEIGHTS)
        if probe is not None:
            probe.check(self.score(probe.tokens), version)
        self.fault = ""
        self.weight_version = version

    def score(self, tokens: Sequence[int]) -> list[float]:
        """See Engine.score."""
        with self.policy.inference():
            hidden = self.policy.forward(tokens, self.policy.single_row(len(tokens)))
            logits = self.policy.lm_head(hidden).float()
            targets = torch.tensor(tokens[1:], device=self.device)[:, None]
            return logits[:-1].log_softmax(-1).gather(-1, targets)[:, 0].tolist()

    @contextmanager
    def session(self, requests: Sequence[Request], beside: Engine | None = None) -> Iterator[None]:
        """See HoldsSessions. As many rows at a time as both engines' KV fits."""
        if requests and self.drafting.model is None:  # whose KV would be computed again
            size = self._plan(requests, [beside.policy] if isinstance(beside, TransformersEngine) else [])
            self._session = Session(size, row_tokens(requests))
        try:
            yield
        finally:
            self._session = None

    def reset_cache(self) -> None:
        """Nothing to forget: KV lives only inside `generate` and `session`."""

    def close(self) -> None:
        """Nothing to free: the model belongs to the trainer."""

    def _rows(self, requests: Sequence[Request], own: int | None = None) -> list[Response]:
        """Args: own: rows of the batch, if these requests are of the next one; they are numbered after them."""
        if self.fault:
            raise RolloutError(f"{self.fault}; send the weights again before generating")
        for request in requests:
            check_request(request, self.vocab, self.context, self.limit)
        return [
            Response(request, number=i, drafting=not request.plain, ahead=own is not None)
            for i, request in enumerate(requests, own or 0)
        ]

    def _run(self, rows: list[Response], stats: EngineStats, ahead: Sequence[Response] = ()) -> None:
        """Finishes all rows, as many at a time as fit the memory, and decodes rows of the next batch beside them.

        If memory runs out nevertheless, rows of the next batch go first, and then fewer rows run at a time, from then
        on, also in later rollouts. No row loses what it has emitted; its KV is computed again. Which rows share a pass
        changes no token.
        """
        with ExitStack() as stack:
            for context in (gc_frozen, self.policy.inference, self.drafting.inference):
                stack.enter_context(context())
            while any(row.finish is None for row in rows):
                size = self._session.slabs if self._session else self._plan([row.request for row in rows])
                try:
                    self._decode(rows, size, stats, ahead)
                except Exception as error:
                    if not out_of_memory(error):
                        raise
                    reason = str(error)  # the error itself would keep the tensors that fill the memory
                else:
                    continue
                if ahead:
                    ahead = []
                    self.fill = 0
                    log.warning(
                        "out of memory (%s); from now on no rows of the next batch join, as rollout.fill=0", reason
                    )
                else:
                    self._halve(size, reason)

    def _halve(self, size: int, reason: str) -> None:
        """Remembers that `size` rows do not fit."""
        if size == 1:
            raise RolloutError(
                f"out of memory with one row at a time: {reason}. Use a lower rollout.tokens_per_pass "
                f"(now {self.limits.tokens_per_pass}) or max_new_tokens"
            )
        self._max_rows = size // 2
        if self._session:
            self._session = Session(self._max_rows, self._session.capacity)
        advice = "out of memory with %d rows at a time (%s); from now on %d. Set rollout.rows_per_batch=%d"
        log.warning(advice, size, reason, self._max_rows, self._max_rows)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        drafter = self.drafting.model.model if self.drafting.model else None
        state = self.model.state_dict()
        if drafter is not None:
            state |= {DRAFTER + name: tensor for name, tensor in drafter.state_dict().items()}
        check = WeightCheck(self.model, drafter)
        check.before(weights)
        with torch.no_grad():
            for name, tensor in check.checked(weights):
                state[name].copy_(tensor)

    def _plan(self, requests: Sequence[Request], others: Sequence[PackedModel] = ()) -> int:
        """Rows at a time whose KV fits, in this engine's models and in the others."""
        draft_models = [self.drafting.model.packed] if self.drafting.model else []
        return max_concurrent_rows(requests, [self.policy, *draft_models, *others], self._max_rows)

    def _decode(self, rows: list[Response], size: int, stats: EngineStats, ahead: Sequence[Response] = ()) -> None:
        """Decodes rows to their ends: draft, launch, settle, and admit waiting rows where others have ended.

        Where no row waits, rows `ahead`, of the next batch, are admitted too; they stop with the last of the others.

        Where passes run while the host goes on, many rows go in two cohorts: the host settles and drafts for one while
        the other's pass runs. Args: size: rows at a time.
        """
        room = self._plan([row.request for row in (*rows, *ahead)]) if ahead else 0
        if room < size:  # their longer prompts would take the memory of the batch's own rows
            ahead = []
        requests = [row.request for row in (*rows, *ahead)]
        slabs = max(size, min(room, self.fill))
        policy = Reader(self.policy, requests, slabs, self.tie_margin, self.drafting.keeps_states, self._session)
        self.drafting.open(requests, slabs, policy)
        waiting = deque(row for row in rows if row.finish is None)
        beside = deque(ahead)
        cohorts = [Cohort() for _ in range(1 + (self.policy.overlaps and min(size, len(waiting)) >= OVERLAP))]
        while self._goes_on(waiting, cohorts):
            for cohort in cohorts:
                self._settle(policy, cohort, stats)
                self._leave(policy, cohort, closing=not waiting and not beside)
                for queue, most in (waiting, size), (beside, 0 if waiting else min(self.fill, slabs)):
                    count = min(policy.free, joining(len(cohort.rows), len(queue), -(-most // len(cohorts))))
                    if count > 0:
                        self._admit(policy, cohort, [queue.popleft() for _ in range(count)], stats)
                if cohort.rows and self._goes_on(waiting, cohorts):
                    self._launch(policy, cohort, stats)
            if len(cohorts) > 1 and not waiting and sum(len(cohort.rows) for cohort in cohorts) < OVERLAP:
                for cohort in cohorts:
                    self._settle(policy, cohort, stats)
                cohorts = [Cohort({number: row for cohort in cohorts for number, row in cohort.rows.items()})]
        for cohort in cohorts:
            self._settle(policy, cohort, stats)  # rows of the next batch alone
        stats.ties += policy.ties

    def _goes_on(self, waiting: Collection[Response], cohorts: Iterable[Cohort]) -> bool:
        """Whether a row of the batch has not ended; those of the next one stop with the last, here or elsewhere."""
        rows = [row for cohort in cohorts for row in cohort.rows.values()]
        return bool(waiting) or any(not row.ahead for row in rows) or (bool(rows) and self.others_at_work())

    def _admit(self, policy: Reader, cohort: Cohort, rows: list[Response], stats: EngineStats) -> None:
        """Admits rows and computes the KV of their prompts and of what they have emitted."""
        began = time.perf_counter()
        tokens = policy.forward_tokens
        new = {row.number: row.tokens for row in rows}
        policy.admit(new)
        self.drafting.admit(new)
        policy.prefill()
        cohort.rows |= {row.number: row for row in rows}
        stats.forward_tokens += policy.forward_tokens - tokens
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        stats.prefill_s += time.perf_counter() - began

    def _leave(self, policy: Reader, cohort: Cohort, closing: bool) -> None:
        """Removes rows that have ended. Args: closing: no row waits for their slabs."""
        if ended := [number for number, row in cohort.rows.items() if row.finish is not None]:
            policy.leave(ended, closing)
            self.drafting.leave(ended, closing)
            cohort.rows = {number: row for number, row in cohort.rows.items() if row.finish is None}

    def _launch(self, policy: Reader, cohort: Cohort, stats: EngineStats) -> None:
        """Drafts for the rows of a cohort and launches their passes; settles them too if the host has to wait."""
        began = time.perf_counter()
        own = {number: row for number, row in cohort.rows.items() if not row.ahead}
        cohort.drafts = dict(zip(own, self.drafting.propose([*own.values()], stats), strict=True))
        if len(own) < len(cohort.rows):
            left = max(0, self.fill - sum(1 + len(draft.tokens) for draft in cohort.drafts.values()))
            beside = [row for row in cohort.rows.values() if row.ahead][:left]  # the others sit this pass out
            cohort.drafts |= zip([row.number for row in beside], self.drafting.fit(beside, left), strict=True)
        stats.draft_s += time.perf_counter() - began
        feed = {number: [cohort.rows[number].last, *draft.tokens] for number, draft in cohort.drafts.items()}
        for i, part in enumerate(policy.parts(feed)):
            in_flight = policy.launch(part)
            in_flight.asking_s = None if i else self.drafting.asking  # charged to the first pass
            cohort.in_flight.append(in_flight)
            if not self.policy.overlaps:
                self._settle(policy, cohort, stats)

    def _settle(self, policy: Reader, cohort: Cohort, stats: EngineStats) -> None:
        """Waits for the passes of a cohort; its rows emit what is accepted."""
        for in_flight in cohort.in_flight:
            began = time.perf_counter()
            ahead = [len(fed) for number, fed in in_flight.feed.items() if cohort.rows[number].ahead]
            tokens = sum(map(len, in_flight.feed.values())) - sum(ahead)
            emitted_tokens = 0
            for number, samples in policy.collect(in_flight):
                if not samples.usable:
                    refuse_unusable([False], self.weight_version)
                row, draft = cohort.rows[number], cohort.drafts[number]
                accepted = self.rule(row.request.key, draft, samples)
                emitted = self.drafting.advance(row, draft, accepted, self.sampling.eos_ids, stats)
                policy.rollback(number, len(row.tokens) - 1)
                emitted_tokens += 0 if row.ahead else emitted
            now = time.perf_counter()
            device_s = now - max(in_flight.began, self._last_settled)  # from when the device was free for it
            rows, width, asking_s = len(in_flight.feed) - len(ahead), policy.width, in_flight.asking_s
            self.drafting.budget.observe_pass(
                tokens,
                device_s,
                rows,
                width,
                emitted_tokens,
                asking=asking_s,
                ahead=(len(ahead), sum(ahead)),
            )
            self._last_settled = now
            host_s = in_flight.launch_s + now - began  # the host's part, which adds up to wall clock
            stats.count_pass(tokens + sum(ahead), host_s, tokens > rows)
        cohort.in_flight.clear()
