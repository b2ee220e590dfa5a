"""What rides in a pass: rows' own drafters, the texts of all prompts, a draft model; the budget decides how much."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Protocol

from specrl.rollout.drafting.budget import AcceptanceBucket, Budget, Plan
from specrl.rollout.drafting.chain import Chain
from specrl.rollout.drafting.contexts import ContextTable
from specrl.rollout.drafting.draft import EMPTY, Draft, ask_all
from specrl.rollout.drafting.suffix import SuffixDrafter
from specrl.rollout.types import EngineStats, Request, RolloutError
from specrl.rollout.verify import accept_exact

if TYPE_CHECKING:
    from specrl.rollout.engines.response import Response

log = logging.getLogger(__name__)
CONTEXT_TOKENS = 8  # of prompt and response that contexts are shown


class Policy(Protocol):
    """The model that verifies, as far as drafting knows it."""

    vocab: int
    context: int

    def timing(self, rows: int, tokens: int) -> tuple[int, float]: ...


class DraftModel(Policy, Protocol):
    """A small model that drafts for rows whose own drafters do worse; see rollout/engines/local/drafter.py."""

    reads_states: bool

    def inference(self) -> AbstractContextManager: ...
    def open(self, requests: Sequence[Request], places: int, policy) -> None: ...
    def admit(self, rows: Mapping[int, Sequence[int]]) -> None: ...
    def leave(self, rows: Sequence[int], close_up: bool) -> None: ...
    def learn(self, responses: Iterable[Sequence[int]]) -> None: ...
    def behind(self, row: int, length: int) -> int: ...
    def propose(self, texts: Mapping, room: Sequence[int], chain: Chain, budget: Budget) -> list[list[int]]: ...


class Drafting:
    """Proposes what each row carries, and learns from what stood.

    An engine calls `begin` and `open`, then in turns `propose`, `learn` for every row and `observe_pass` with what
    `asking` was after this pass's `propose`; `admit` and `leave` when rows come and go, `end` when all are done.

    Args:
        budget: decides how much rides.
        contexts: rows that speculate may also draft from the responses to all prompts; None: they may not.
        model: drafts for rows whose own drafters do worse.
        redraws: rows may also draft what the last pass drew behind a mismatch: with their own noise, and mostly the
            right text before it. Keyed Jacobi iteration (arXiv 2510.24211), where it earns more than the texts do.
    """

    whole = False
    """A row's old text is verified once, whole."""
    reads_states = False
    """Its rule asks for `Drawn.hidden`."""
    asking: float | None = None
    """Seconds that asking for the drafts of the last `propose` took; None if nobody was asked."""

    def __init__(
        self,
        budget: Budget | None = None,
        contexts: ContextTable | None = None,
        model: DraftModel | None = None,
        redraws: bool = False,
    ):
        self.budget, self.contexts, self.model = budget or Budget(), contexts, model
        self.of_states = model is not None and model.reads_states
        """The model drafts from the policy's last hidden states, which its reader must keep."""
        self.redraws, self.vocab = redraws, 0
        self._failed: set[str] = set()  # kinds of drafters whose faults were logged

    def attach(self, policy: Policy) -> None:
        """The model whose passes the drafts will ride in; a few of them are timed.

        Raises:
            RolloutError: the draft model has another vocabulary.
        """
        self.vocab = policy.vocab
        if self.model:
            check_vocab(self.model.vocab, policy.vocab)
        for rows, tokens in ((1, 1), (1, min(256, policy.context)), (32, 32)):
            self.budget.calibrate([policy.timing(rows, tokens)], rows, tokens // rows)
            if self.model:
                self.budget.drafter.calibrate([self.model.timing(rows, tokens)], rows)

    def inference(self) -> AbstractContextManager:
        """Within which `propose` is called."""
        return self.model.inference() if self.model else nullcontext()

    def begin(self, requests: Sequence[Request]) -> None:
        """A rollout begins, maybe with other weights."""
        if any(not request.plain and (self.model or request.drafter) for request in requests):
            self.budget.next_rollout()

    def open(self, requests: Sequence[Request], places: int, policy=None) -> None:
        """Rows of these requests, numbered in this order, are decoded from now on, at most `places` at a time.

        Args: policy: the reader that decodes them, for a draft model.
        """
        if self.model:
            self.model.open(requests, places, policy)

    def admit(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Rows take part. Args: rows: number -> what it has emitted already."""
        if self.model:
            self.model.admit(rows)

    def leave(self, rows: Sequence[int], close_up: bool) -> None:
        """Rows have ended. Args: close_up: no others will take their places."""
        if self.model:
            self.model.leave(rows, close_up)

    def propose(self, rows: Sequence[Response], stats: EngineStats) -> list[Draft]:
        """What each of the rows, none of them finished, carries in the next pass.

        Counts the rows that have a guess and carry nothing.
        """
        plan, drafts = self._own(rows)
        paused = Counter(row.kind for row, draft in zip(rows, drafts, strict=True) if not draft.tokens)
        for kind in paused.keys() - plan.handed - {None}:
            stats.paused += paused[kind]
            stats.paused_acceptance += paused[kind] * self.budget.acceptance(kind)
            stats.paused_needed += paused[kind] * plan.needed
        if self.model:
            self._by_model(rows, drafts, plan)
        return drafts

    def guess(self, row: Response, limit: int) -> Sequence[int]:
        """Asks the row's own drafter for at most `limit` tokens."""
        self._guess([row], [limit])
        return [*row.guess.tokens]

    def learn(
        self, row: Response, draft: Draft, tokens: Sequence[int], drafted: int, behind: Sequence[int] = ()
    ) -> None:
        """What became of a row's draft, and of its guess had that been carried. Args: see Stood."""
        if draft.source == "model":
            self.budget.drafter.observe_chain(draft.logprobs, drafted)
        if self.redraws:
            row.redraws = behind
        guess, accepted = draft.tokens, drafted
        if not guess or draft.source != row.guess.source:
            guess = row.guess.tokens[: len(tokens)]
            accepted = accept_exact(tokens, guess)
        if length := len(guess):
            self.budget.observe_draft(row.kind, length, accepted)
            row.state = "agreeing" if accepted == length else "diverged" if accepted else "lost"

    def observe_pass(
        self,
        tokens: int,
        seconds: float,
        rows: int = 0,
        width: int = 0,
        stood: int = 0,
        asking: float | None = None,
    ) -> None:
        """See Budget.observe_pass."""
        self.budget.observe_pass(tokens, seconds, rows, width, stood, asking=asking)

    def end(self, rows: Sequence[Response], stats: EngineStats) -> None:
        """The rollout is done: later ones may draft from the responses of rows that speculate."""
        if self.model:
            self.model.learn(row.tokens for row in rows)
        if self.contexts is not None:
            began = time.perf_counter()
            self.contexts.learn((row.request.prompt, row.tokens) for row in rows if not row.request.plain)
            stats.draft_s += time.perf_counter() - began

    def count_faults(self, rows: Sequence[Response], stats: EngineStats) -> None:
        """Counts the rows whose drafter failed; the first fault of each kind of drafter is logged."""
        for row in rows:
            if row.fault:
                stats.drafter_faults += 1
                kind = type(row.request.drafter).__name__
                if kind not in self._failed:
                    log.warning("%s. The row goes on without it; later faults are only counted", row.fault)
                self._failed.add(kind)

    def _own(self, rows: Sequence[Response]) -> tuple[Plan, list[Draft]]:
        """What rides without the model."""
        began, self.asking = time.perf_counter(), None
        if not self.model and (plan := self.budget.rest()) is not None:
            for row in rows:
                if row.guess.tokens:
                    row.guess = Draft((), row.guess.source)
            return plan, [row.guess for row in rows]
        width = max((row.length for row in rows), default=1)
        longest = self.budget.longest(len(rows), width)
        self._guess(rows, [min(longest, row.room - 1) for row in rows])
        plan = self.budget.plan([row.kind for row in rows], self.model is not None, width)
        drafts = self._carried(rows, plan)
        self.budget.observe_asking(any(draft.tokens for draft in drafts))
        self.asking = time.perf_counter() - began
        return plan, drafts

    def _guess(self, rows: Sequence[Response], limits: Sequence[int]) -> None:
        """Asks the rows' own drafters; rows guess their redraws where these are worth more than what those have."""
        drafters = [row.drafter if row.drafting else None for row in rows]
        worth = cache(self.budget.acceptance)
        texts = [row.tokens for row in rows]
        guesses = ask_all(drafters, texts, limits, self.vocab, worth, lambda i, fault: rows[i].give_up(fault))
        for row, drafter, guess, limit in zip(rows, drafters, guesses, limits, strict=True):
            row.guess = guess
            known = drafter.fit if type(drafter) is SuffixDrafter else row.state
            row.kind = (known, guess.source) if guess.tokens else None
            if row.redraws and row.drafting and limit > 0:
                kind = row.state, "redraw"
                if worth(kind) > worth(row.kind):
                    row.guess, row.kind = _joined(row.redraws, guess.tokens, limit), kind

    def _carried(self, rows: Sequence[Response], plan: Plan) -> list[Draft]:
        """As much of each row's guess as its kind may carry, or what the contexts promise more of."""
        drafts = [
            Draft([*row.guess.tokens[:most]], row.guess.source) if (most := plan.windows[row.kind]) else EMPTY
            for row in rows
        ]
        if self.contexts is None or self.budget.window:
            return drafts
        price = plan.needed
        reach = self.contexts.most(max((row.room for row in rows), default=1) - 1, price)
        gains: dict[tuple[AcceptanceBucket, int], float] = {}
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            same = row.kind, len(draft.tokens)
            if (gain := gains.get(same)) is None:
                gain = gains[same] = self.budget.gain(*same, price)
            if reach > gain and row.drafting:
                text = (*row.request.prompt[-CONTEXT_TOKENS:], *row.tokens[-CONTEXT_TOKENS:])
                likely, _ = self.contexts.draft(text, row.room - 1, price, gain)
                if likely:
                    drafts[i] = Draft(likely, "contexts")
        return drafts

    def _by_model(self, rows: Sequence[Response], drafts: list[Draft], plan: Plan) -> None:
        """Lets the model draft for rows that it serves better; those it has nothing for keep their own draft."""
        reach = [min(row.room - 1, self.model.context - row.length + 1) for row in rows]
        places = [
            i
            for i, (row, draft) in enumerate(zip(rows, drafts, strict=True))
            if row.drafting and (row.kind in plan.handed or not draft.tokens) and reach[i] > 0
        ]
        asked, room = [rows[i] for i in places], [reach[i] for i in places]
        chain = self.budget.chain([self.model.behind(row.number, len(row.tokens)) for row in asked], plan)
        texts = {row.number: row.tokens for row in asked}
        proposed = self.model.propose(texts, room, chain, self.budget)
        for i, tokens, logprobs in zip(places, proposed, chain.logprobs, strict=False):  # a probe is of a few rows
            if tokens:
                drafts[i] = Draft(tokens, "model", logprobs)


def _joined(redraws: Sequence[int], text: Sequence[int], limit: int) -> Draft:
    """The redraws, and what follows their last one in a text that has it at the same position."""
    n = len(redraws)
    rest = text[n:] if len(text) > n and text[n - 1] == redraws[-1] else ()
    return Draft([*redraws[:limit], *rest], "redraw")


def check_vocab(theirs: int, policys: int) -> None:
    """Raises RolloutError when a draft model does not know the policy's tokens."""
    if theirs != policys:
        raise RolloutError(
            f"the draft model knows {theirs} tokens and the policy {policys}: its drafts would mean other texts. Use a "
            "draft model with the policy's tokenizer"
        )
