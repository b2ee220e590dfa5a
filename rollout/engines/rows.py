"""What the engines share: a response in the making, and what a request must fulfil."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import index

from rollout.budget import Budget, Kind, Plan, State
from rollout.drafters.contexts import ContextTable
from rollout.engines.base import Speculation
from rollout.tree import children, depths, followers
from rollout.types import Completion, Drafter, EngineStats, Request, RolloutError
from rollout.verify import accept_exact, cut

LENIENT_KEY = 0x5851F42D4C957F2D  # separates the acceptance uniforms from the Gumbel noise of the same key


@dataclass(slots=True)
class Row:
    """One response in the making. The engine's KV holds everything but its last token."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    behaviour: list[float] = field(default_factory=list)
    reused: list[bool] = field(default_factory=list)
    finish: str | None = None
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    passes: int = 0
    drafting: bool = True
    state: State = "start"
    guess: list[int] = field(default_factory=list)
    """What its own drafter expects next, carried or not."""
    source: str = ""
    """Where the guess comes from."""
    draft: list[int] = field(default_factory=list)
    """What it carries in the next pass."""
    carried: str = ""
    """Where that comes from: `source`, `contexts` or `model`."""
    parents: list[int] | None = None
    """The shape of what it carries where that is a tree, as in rollout/tree.py; None for a single path."""
    chain: list[float] | None = None
    """The draft model's log-probs of the tokens it drafted; None when the draft is the row's own."""
    rejected: list[int] = field(default_factory=list)

    @property
    def cached(self) -> int:
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else self.request.prompt[-1]

    @property
    def room(self) -> int:
        return self.request.max_new_tokens - len(self.tokens)

    @property
    def kind(self) -> Kind:
        """What the worth of the guess is estimated by; None without a guess."""
        return (self.state, self.source) if self.guess else None

    def restart(self) -> None:
        """Forgets what was emitted; the passes it took still count."""
        self.tokens, self.logprobs, self.behaviour, self.reused, self.rejected = [], [], [], [], []
        self.finish, self.state, self.drafting = None, "start", not self.request.plain

    def ask(self, limit: int, vocab: int) -> list[int]:
        """Asks its own drafter for at most `limit` tokens; the guess ends before the first id that does not exist."""
        drafter = self.request.drafter
        self.guess = []
        if drafter and self.drafting and limit > 0:
            self.guess = known(ids(drafter, drafter.propose(tuple(self.tokens), limit), limit), vocab)
        self.source = self.carried = getattr(drafter, "source", "custom")
        return self.guess

    def carry(self, window: int, budget: Budget, price: float, contexts: ContextTable | None) -> None:
        """Decides what rides in the next pass: `window` tokens of the guess, or what the contexts promise more of.

        Args: price: what a draft token costs, in accepted tokens.
        """
        self.draft, self.chain = self.guess[:window], None
        if contexts is not None and self.drafting:
            text = (*self.request.prompt[-8:], *self.tokens[-8:])
            likely, gain = contexts.draft(text, self.room - 1, price)
            if likely and gain > budget.gain(self.kind, len(self.draft), price):
                self.draft, self.carried = likely, "contexts"

    def learn(self, budget: Budget, draft: Sequence[int], emitted: Sequence[int], accepted: int) -> None:
        """Tells the budget what became of the guess, or would have become of it had it been carried.

        Args: draft: what was carried; emitted: the tokens that came of it; accepted: how many of the draft's stood.
        """
        stood = accepted
        budget.observe_emitted(len(emitted))
        if self.carried != self.source or self.parents is not None:
            draft = self.guess[: len(emitted)]
            accepted = accept_exact(emitted, draft)
        if drafted := len(draft):
            budget.observe_draft(self.kind, drafted, accepted)
            branched = self.parents is not None and stood
            self.state = "agreeing" if accepted == drafted else "diverged" if accepted or branched else "lost"

    def emit(self, tokens: list[int], logprobs: list[float], behaviour: list[float], accepted: int, eos_ids) -> int:
        """Appends up to the first EOS or the cap; the first `accepted` tokens are the draft's. Returns the count."""
        count, self.finish = cut(tokens, eos_ids, self.room)
        self.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        self.behaviour += behaviour[:count]
        self.reused += [i < accepted for i in range(count)]
        self.passes += 1
        if self.finish:
            self.seconds = time.perf_counter() - self.began
        if self.finish and self.request.drafter and self.drafting:
            self.request.drafter.propose(tuple(self.tokens), 0)  # rows that draft from this one get its end too
        return count

    def completion(self, version: int, rule: str) -> Completion:
        """The finished response, under the weights `version`."""
        return Completion(
            self.tokens,
            self.logprobs,
            self.behaviour,
            self.reused,
            self.finish,
            version,
            self.passes,
            self.seconds,
            draft_version=self.request.draft_version if rule == "lenient" else None,
            rejected=self.rejected,
        )


def ask_all(
    rows: Sequence[Row],
    budget: Budget,
    vocab: int,
    stats: EngineStats,
    contexts: ContextTable | None = None,
    model: bool = False,
) -> Plan:
    """Asks the rows' own drafters, then the budget how much of each guess rides in the next pass as its draft.

    Counts the rows that have a guess and carry nothing. Args: contexts: what may serve a row better than its guess;
    model: a draft model may help them.
    """
    began = time.perf_counter()
    plan = None if model else budget.rest()
    if plan is not None:
        for row in rows:
            row.draft, row.carried, row.chain = [], row.source, None
    else:
        width = max((row.cached for row in rows), default=0) + 1
        longest = budget.longest(len(rows), width)
        for row in rows:
            row.ask(min(longest, row.room - 1), vocab)
        plan = budget.plan([row.kind for row in rows], model, width)
        for row in rows:
            row.carry(plan.windows[row.kind], budget, plan.needed, None if budget.window else contexts)
        carried = any(row.draft for row in rows)
        budget.observe_plan(carried)
        budget.observe_asking(time.perf_counter() - began)
    paused = [row.kind for row in rows if row.guess and not row.draft and row.kind not in plan.handed]
    stats.paused += len(paused)
    stats.paused_acceptance += sum(map(budget.acceptance, paused))
    stats.paused_needed += plan.needed * len(paused)
    return plan


def ids(drafter: Drafter, found: Iterable[int], limit: int) -> list[int]:
    """The first `limit` ids of what a drafter proposes.

    Raises:
        RolloutError: it proposes something else than token ids.
    """
    try:
        return [index(token) for token in islice(found, limit)]
    except TypeError as error:
        raise RolloutError(
            f"the drafter {type(drafter).__name__} proposed {found!r:.80}, which are no token ids: {error}. Return a "
            "sequence of ints, an empty one for no guess"
        ) from error


def known(tokens: Sequence[int], vocab: int) -> list[int]:
    """The tokens before the first id that does not exist."""
    return list(tokens[: next((i for i, t in enumerate(tokens) if not 0 <= t < vocab), len(tokens))])


def pack(rows: Sequence[Row], drafts: Sequence[Sequence[int] | None]) -> tuple[list, list, list, list, dict]:
    """What the rows carry in one pass, side by side; a draft of None leaves its row out.

    Returns: of every token its id, its row's key, the response position of the draw behind it, and the draft's tokens
    there: one, or as many as some row has branches, filled up with 0. Last, the parents of the rows that carry trees.
    """
    trees = {i: row.parents for i, row in enumerate(rows) if drafts[i] and row.parents is not None}
    width = max((len(after) for parents in trees.values() for after in children(parents)), default=1)
    tokens, keys, at, targets = [], [], [], []
    for row, draft in zip(rows, drafts, strict=True):
        if draft is None:
            continue
        tokens += [row.last, *draft]
        keys += [row.request.key] * (len(draft) + 1)
        if row.parents is None:
            at += range(len(row.tokens), len(row.tokens) + len(draft) + 1)
        else:
            at += [len(row.tokens) + depth for depth in depths(row.parents)]
        if trees:
            targets += followers(draft, row.parents or range(-1, len(draft) - 1), width)
        else:
            targets += [*draft, 0]
    return tokens, keys, at, targets, trees


def learn_all(rows: Sequence[Row], contexts: ContextTable | None, stats: EngineStats) -> None:
    """Adds the responses of rows that speculate to what later ones may draft from."""
    if contexts is not None:
        began = time.perf_counter()
        contexts.learn((row.request.prompt, row.tokens) for row in rows if not row.request.plain)
        stats.draft_s += time.perf_counter() - began


def check_request(request: Request, vocab: int, context: int, speculation: Speculation, limit: str = "") -> None:
    """Raises RolloutError for a request that the engine cannot serve.

    Args: vocab: ids below it exist; context: most tokens of a prompt with its response; limit: why there are no more.
    """
    prompt, cap = request.prompt, request.max_new_tokens
    if not (isinstance(prompt, Sequence) and {*map(type, prompt)} <= {int}):  # a tensor, an array, floats, a text
        raise RolloutError(
            f"a prompt is no sequence of token ids: {prompt!r:.60}. Give Python integers, as prompt.tolist() does"
        )
    if not (type(request.key) is int and -(2**63) <= request.key < 2**63):
        raise RolloutError(f"key={request.key!r:.60} is no signed 64-bit integer, as rollout.keys.derive_key gives")
    if type(cap) is not int:
        raise RolloutError(f"max_new_tokens={cap!r:.60} is not a whole number")
    if not prompt:
        raise RolloutError("a prompt has no tokens; a rollout needs at least one")
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        bad = next(t for t in prompt if not 0 <= t < vocab)
        raise RolloutError(f"a prompt holds the token id {bad}, outside the model's 0..{vocab - 1}")
    if cap < 1:
        raise RolloutError(f"max_new_tokens={cap} leaves no room for a response; use at least 1")
    if len(prompt) >= context:
        raise RolloutError(
            f"a prompt of {len(prompt)} tokens leaves no room for a response in the model's context of {context}"
            f"{limit}; use a shorter prompt, of at most {context - 1} tokens"
        )
    if cap > context - len(prompt):
        raise RolloutError(
            f"a prompt of {len(prompt)} tokens plus max_new_tokens={cap} exceeds the model's context of {context}"
            f"{limit}. Use rollout.max_new_tokens={context - len(prompt)} or less"
        )
    if speculation.rule == "lenient" and request.drafter and request.draft_logprobs is None:
        raise RolloutError("the lenient rule needs the stored log-probs of every draft; the cache holds none")
