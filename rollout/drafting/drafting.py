"""Drafts of a pass, from the rows' drafters and a draft model, within the lengths of the budget."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING

from specrl.rollout.drafting.budget import Budget, Plan
from specrl.rollout.drafting.draft import Draft, ask_all
from specrl.rollout.drafting.suffix import SuffixDrafter
from specrl.rollout.types import EngineStats, Request, RolloutError
from specrl.rollout.verify import Accepted, accept_exact

if TYPE_CHECKING:
    from specrl.rollout.engines.local.drafter import ModelDrafter
    from specrl.rollout.engines.local.model import PackedModel
    from specrl.rollout.engines.local.reader import Reader
    from specrl.rollout.engines.response import Response


class Drafting:
    """Proposes a draft for each row, and learns how much of it is accepted.

    An engine calls `begin` and `open`. For each pass it then calls `propose`, `learn` for every row, and
    `budget.observe_pass` with the `asking` of this `propose`. It calls `admit` and `leave` when rows join and leave the
    batch, and `end` after the last pass.

    Args:
        budget: decides the draft lengths.
        model: drafts for rows whose drafters have a lower acceptance.
    """

    verifies_once = False
    """Each row's old text is verified in one pass, and there are no later drafts."""
    reads_states = False
    """The acceptance rule needs `TargetSamples.hidden`."""
    asking: float | None = None
    """Seconds that the last `propose` took to get its drafts; None if no drafter was called."""

    def __init__(self, budget: Budget | None = None, model: ModelDrafter | None = None):
        self.budget = budget or Budget()
        self.model = model
        self.keeps_states = model is not None and model.reads_states
        """The draft model reads the policy's final hidden states, which the policy's reader must keep."""
        self.vocab = 0
        self._requests = 0  # of the rollout; 0 in a server, which cannot know
        self._begun: set[int] = set()  # those of its rows that have begun

    def attach(self, policy: PackedModel) -> None:
        """Sets the model that verifies the drafts, and times a few of its passes: as many as their costs have terms.

        Raises:
            RolloutError: the draft model has a different vocabulary.
        """
        self.vocab = policy.vocab
        if self.model:
            check_vocab(self.model.packed.vocab, policy.vocab)
        for rows, tokens in ((1, 1), (1, min(256, policy.context)), (32, 32), (32, 64)):
            self.budget.calibrate([policy.timing(rows, tokens)], rows, tokens // rows)
            if self.model:
                self.budget.drafter.calibrate([self.model.packed.timing(rows, tokens)], rows)

    def inference(self) -> AbstractContextManager:
        """The context in which `propose` must be called."""
        return self.model.packed.inference() if self.model else nullcontext()

    def begin(self, requests: Sequence[Request]) -> None:
        """Starts a rollout. The weights may have changed."""
        if any(not request.plain and (self.model or request.drafter) for request in requests):
            self.budget.next_rollout()
        self._requests = len(requests)
        self._begun = set()

    def open(self, requests: Sequence[Request], max_rows: int, policy: Reader) -> None:
        """Starts decoding these requests, whose rows are numbered in this order, at most `max_rows` at a time.

        Args: policy: the reader that decodes them, for a draft model.
        """
        if self.model:
            self.model.open(requests, max_rows, policy)

    def admit(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Adds rows to the batch. Args: rows: row number -> tokens emitted so far."""
        if self.model:
            self.model.reader.admit(dict.fromkeys(rows, ()))  # it reads what they emitted when it drafts for them

    def leave(self, rows: Sequence[int], compact: bool) -> None:
        """Removes finished rows. Args: compact: no other rows will use their KV slabs."""
        if self.model:
            self.model.reader.leave(rows, compact)

    def propose(self, rows: Sequence[Response], stats: EngineStats) -> list[Draft]:
        """The draft of each unfinished row for the next pass.

        Rows whose drafter has a proposal but that draft nothing are counted in `stats`.
        """
        self._observe_lead(rows)
        plan, drafts = self._without_model(rows)
        paused = Counter(row.bucket for row, draft in zip(rows, drafts, strict=True) if not draft.tokens)
        for bucket in paused.keys() - plan.by_model - {None}:
            stats.paused += paused[bucket]
            stats.paused_acceptance += paused[bucket] * self.budget.acceptance(bucket)
            stats.paused_needed += paused[bucket] * plan.needed
        if self.model:
            self._with_model(self.model, rows, drafts, plan)
        return drafts

    def _observe_lead(self, rows: Sequence[Response]) -> None:
        """See `Budget.observe_lead`."""
        if self._requests:
            self._begun |= {id(row) for row in rows}
        if len(self._begun) < max(1, self._requests):
            self.budget.observe_lead(None)
            return
        drafting = [row for row in rows if row.drafting]
        self.budget.observe_lead(min((row.lead for row in drafting), default=0))

    def guess(self, row: Response, limit: int) -> Sequence[int]:
        """At most `limit` tokens from the row's drafter."""
        self._guess([row], [limit])
        return [*row.guess.tokens]

    def fit(self, rows: Sequence[Response], tokens: int) -> list[Draft]:
        """The drafts of rows of the next batch that have so many tokens of a pass together, an equal part each."""
        each = tokens // len(rows) - 1 if rows else 0
        return [Draft(self.guess(row, max(0, min(each, row.remaining - 1))), row.guess.source) for row in rows]

    def advance(
        self, row: Response, draft: Draft, accepted: Accepted, eos_ids: frozenset[int], stats: EngineStats
    ) -> int:
        """The row emits what a rule made of a pass that verified this draft; returns the number of its new tokens."""
        emitted = row.emit(accepted, eos_ids)
        self.learn(row, draft, accepted.tokens, accepted.drafted)
        if row.ahead:
            stats.ahead_tokens += emitted
        else:
            stats.count(draft.source, len(draft.tokens), min(accepted.drafted, emitted))
        return emitted

    def learn(self, row: Response, draft: Draft, tokens: Sequence[int], drafted: int) -> None:
        """Records how much of a row's draft was accepted, or would have been of a proposal that was not drafted.

        Args: see `verify.Accepted`.
        """
        if draft.source == "model" and draft.logprobs is not None:
            self.budget.drafter.observe_chain(draft.logprobs, drafted)
        guess = draft.tokens
        accepted = drafted
        if not guess or draft.source != row.guess.source:
            guess = row.guess.tokens[: len(tokens)]
            accepted = accept_exact(tokens, guess)
        if length := len(guess):
            self.budget.observe_draft(row.bucket, length, accepted)
            row.state = "agreeing" if accepted == length else "diverged" if accepted else "lost"

    def end(self, rows: Sequence[Response], stats: EngineStats) -> None:
        """Ends the rollout."""
        stats.tried_s = self.budget.account.close()
        if self.model:
            self.model.learn(row.tokens for row in rows)

    def _without_model(self, rows: Sequence[Response]) -> tuple[Plan, list[Draft]]:
        began = time.perf_counter()
        self.asking = None
        if not self.model and (plan := self.budget.skipping_plan()) is not None:
            for row in rows:
                if row.guess.tokens:
                    row.guess = Draft((), row.guess.source)
            return plan, [row.guess for row in rows]
        width = max((row.length for row in rows), default=1)
        longest = self.budget.longest(len(rows), width)
        self._guess(rows, [min(longest, row.remaining - 1) for row in rows])
        buckets = [row.bucket for row in rows]
        plan = self.budget.plan(buckets, self.model is not None, width)
        if not self.model:
            plan = self.budget.affordable(buckets, plan)
        drafts = [row.guess.first(plan.lengths[row.bucket]) for row in rows]
        self.asking = time.perf_counter() - began
        return plan, drafts

    def _guess(self, rows: Sequence[Response], limits: Sequence[int]) -> None:
        """Calls the rows' drafters."""
        drafters = [row.request.drafter if row.drafting else None for row in rows]
        worth = cache(self.budget.acceptance)
        texts = [row.tokens for row in rows]
        guesses = ask_all(drafters, texts, limits, self.vocab, worth)
        for row, drafter, guess in zip(rows, drafters, guesses, strict=True):
            row.guess = guess
            quality = drafter.quality if type(drafter) is SuffixDrafter else row.state
            row.bucket = (quality, guess.source) if guess.tokens else None

    def _with_model(self, model: ModelDrafter, rows: Sequence[Response], drafts: list[Draft], plan: Plan) -> None:
        """Replaces the drafts of the rows that the draft model serves, if it has drafts for them."""
        reach = [min(row.remaining - 1, model.packed.context - row.length + 1) for row in rows]
        indices = [
            i
            for i, (row, draft) in enumerate(zip(rows, drafts, strict=True))
            if row.drafting and (row.bucket in plan.by_model or not draft.tokens) and reach[i] > 0
        ]
        asked = [rows[i] for i in indices]
        chain = self.budget.chain([model.reader.missing_count(row.number, len(row.tokens)) for row in asked], plan)
        texts = {row.number: row.tokens for row in asked}
        proposed = model.propose(texts, [reach[i] for i in indices], chain, self.budget)
        for i, tokens, logprobs in zip(indices, proposed, chain.logprobs, strict=False):  # tests draft for a few rows
            if tokens:
                drafts[i] = Draft(tokens, "model", logprobs)


def check_vocab(drafter: int, policy: int) -> None:
    """Raises RolloutError if the vocabularies of the draft model and the policy have different sizes."""
    if drafter != policy:
        raise RolloutError(
            f"the draft model has {drafter} tokens and the policy {policy}, so its drafts would mean other texts. Use "
            "a draft model with the policy's tokenizer"
        )
