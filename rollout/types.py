"""The records that cache, drafters, engines and trainers exchange. They hold token ids; text stays outside."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length"]


class RolloutError(RuntimeError):
    """A rollout could not be produced or trusted. The message names what, why, the value given and the remedy."""


class UnusableLogits(RolloutError):
    """A model returned logits that are NaN or infinite."""


class CacheError(RolloutError):
    """A trajectory cache cannot be used: written by another model, by a newer version, or not accessible."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished response of one sample, as stored for the next epoch.

    Example: Trajectory(tokens=(52, 17, 1), key=0x1f2e..., finish="stop", version=12, step=12, reward=1.0)
    """

    tokens: Sequence[int]
    """Response token ids, the EOS included when `finish == "stop"`."""
    key: int
    """The 64-bit noise key that it was sampled with (signed)."""
    finish: FinishReason
    """`stop`: ended by an EOS id. `length`: cut by the cap; a longer cap continues it."""
    version: int
    """Weight version that produced the last token."""
    step: int
    """Trainer step that produced it."""
    reward: float | None = None
    """Total reward, None while unknown or when the reward failed."""
    logprobs: Sequence[float] | None = None
    """Log-prob of each token that the next visit verifies it with: `lenient` stores that of the weights `version`,
    `judged` the behaviour log-prob, other settings None."""


def check_example_id(example_id: str) -> None:
    """Raises RolloutError unless the id is a string with a UTF-8 form, from which keys and checksums are derived."""
    if not isinstance(example_id, str):  # 1 and "1" would have the same noise
        raise RolloutError(f"example_id={example_id!r:.60} is not a text. Try example_id={str(example_id)!r:.60}.")
    try:
        example_id.encode()
    except UnicodeEncodeError as error:
        near = example_id.encode(errors="replace").decode()
        raise RolloutError(f"example_id={example_id!a:.60} has no UTF-8 form. Try example_id={near!r:.60}.") from error


class Drafter(Protocol):
    """Guesses a row's next tokens. Guesses decide how many tokens a pass verifies, never which token is emitted.

    What a drafter raises ends the rollout. Tokens beyond `limit` are dropped, and those from the first id on that the
    model does not have.

    A drafter may have an attribute `source` that names the origin of its last proposal. Acceptance is counted and
    estimated by that name; without one all its drafts count as `custom`.
    """

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """At most `limit` ids that may follow the response `tokens` emitted so far; empty when there is no guess.

        It is called once more with a finished response and a limit of 0. If a request is run again, its response starts
        from the beginning.
        """


@dataclass(slots=True)
class Request:
    """What an engine needs to produce one response."""

    prompt: Sequence[int]
    key: int
    """Noise key: the token at response position t is sampled with the noise of (key, t)."""
    max_new_tokens: int
    """From here on, where `prompt` ends with a part of the response."""
    drafter: Drafter | None = None
    """None: there is no old text; an engine with a draft model may still draft."""
    draft_logprobs: Sequence[float] | None = None
    """Stored log-probs of the sample's old text (`Trajectory.logprobs`), by response position; needed by the `lenient`
    rule, whose first proposal it is, and by judges; ignored by `exact`."""
    draft_version: int | None = None
    """Weight version that sampled the first proposal; provenance of what the `lenient` rule reuses."""
    plain: bool = False
    """Decode without drafts, those of the engine's draft model included: the baseline."""
    position: int = 0
    """Response position of the first new token: `prompt` ends with so many tokens of the response."""
    stop_ids: frozenset[int] = frozenset()
    """Ids beside EOS with which the engine ends the request; its finish reason is then `stop` too."""
    expected_tokens: int | None = None
    """Guess of the tokens still to be decoded, for spreading rows over workers; None if there is no guess."""


@dataclass(slots=True)
class Completion:
    """One response with its log-probs and counts. Sequences have the response's length."""

    tokens: list[int]
    logprobs: list[float]
    """Log-prob of each token under the weights `version`, after temperature, top-k and top-p."""
    behaviour_logprobs: list[float]
    """Log-prob under the distribution that sampled the token, by which the trainer's correction divides: the stored one
    for tokens that a judge accepted, a draft model's for its tokens, else as in `logprobs`. The lenient rule gives the
    log-prob of drafting and accepting the token, and infinity (a weight of 0) to the token sampled at a rejection,
    whose distribution needs all of p_old (docs/guarantees.md)."""
    reused: list[bool]
    """True where the token came from a draft, False where it was decoded."""
    finish: FinishReason
    version: int
    passes: int
    """Forward passes this row took part in (the prompt prefill excluded)."""
    seconds: float = 0.0
    """From the start of the engine's call until it was finished."""
    draft_version: int | None = None
    """Weight version that sampled the reused tokens if that is not `version` (the lenient rule), else None."""
    own: tuple[int, float] | None = None
    """Of a text that the policy only read: the token that it samples itself at the first position where that is not the
    text's, with its log-prob. None: it samples the text."""
    mask: list[int] | None = None
    """Of a whole conversation: 1 for tokens that the policy sampled, 0 for those of tools. None: it sampled all."""

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled."""
        return len(self.tokens) if self.mask is None else sum(self.mask)

    @property
    def versions(self) -> list[int]:
        """Weight version that sampled each token. Under `exact` a reused token is the current version's own sample."""
        old = self.version if self.draft_version is None else self.draft_version
        return [old if reused else self.version for reused in self.reused]


@dataclass(frozen=True, slots=True)
class AheadText:
    """A response that was rolled out ahead, with older weights under its own noise; a draft."""

    tokens: Sequence[int]
    finish: FinishReason | None
    """None if it was stopped before its end."""

    def or_longer(self, before: AheadText | None) -> AheadText:
        """The earlier text where this one is only its beginning, as it was stopped sooner; else this one."""
        n = len(self.tokens)
        if before and n < len(before.tokens) and self.finish is None and [*before.tokens[:n]] == [*self.tokens]:
            return before
        return self


@dataclass(slots=True)
class EngineStats:
    """Cost of one `generate` call. Seconds are wall clock."""

    prefill_s: float = 0.0
    verify_s: float = 0.0
    """Passes in which at least one row carried a draft."""
    decode_s: float = 0.0
    """Passes without any draft."""
    draft_s: float = 0.0
    """Asking the drafters."""
    tried_s: float = 0.0
    """Estimated seconds that drafts took beyond what they saved; 0 where they saved some."""
    passes: int = 0
    forward_tokens: int = 0
    """Tokens pushed through the model, rejected ones and prompts included."""
    ahead_tokens: int = 0
    """Tokens emitted by rows of the next batch."""
    drafted: int = 0
    accepted: int = 0
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)
    """`drafted` and `accepted` by the source of the draft: a drafter's `source`, or `model`."""
    paused: int = 0
    """Passes, of all rows together, in which a row had a guess and the budget drafted nothing."""
    paused_acceptance: float = 0.0
    """Sum over `paused` of the estimated probability that the next draft token would have been accepted."""
    paused_needed: float = 0.0
    """Sum over `paused` of the probability from which on a draft token would have paid."""
    route_s: float = 0.0
    """Asking the router."""
    steps: int = 0
    """Reasoning steps, when a router decides who writes them."""
    escalated: int = 0
    """Of `steps`, those the policy wrote."""
    route_faults: int = 0
    """Of `escalated`, those for which the router failed or the draft step was none."""
    route_drift: float = 0.0
    """Sum over kept draft tokens of their log-prob under the draft minus that under the policy, and minus the mean of
    this difference when a learned router was trained."""
    mismatches: int = 0
    """Draft tokens other than the policy's sample about which a learned judge decided."""
    judge_drift: float = 0.0
    """Those of `mismatches` that it accepted, minus as many as it would have when it was trained."""
    ties: int = 0
    """Samples whose best scores were within `tie_margin` and that a canonical forward pass decided."""

    def count(self, source: str, drafted: int, accepted: int) -> None:
        """Counts a draft and its accepted tokens."""
        self.drafted += drafted
        self.accepted += accepted
        if drafted:
            drafted_before, accepted_before = self.sources.get(source, (0, 0))
            self.sources[source] = drafted_before + drafted, accepted_before + accepted

    def count_pass(self, tokens: int, seconds: float, carries: bool, decodes: bool = True) -> None:
        """Counts a pass of `tokens` tokens. Args: carries: it has drafts; decodes: it has more than prompts."""
        self.passes += 1
        self.forward_tokens += tokens
        if carries:
            self.verify_s += seconds
        elif decodes:
            self.decode_s += seconds
        else:
            self.prefill_s += seconds

    def __add__(self, other: EngineStats) -> EngineStats:
        added = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "sources"}
        names = {**self.sources, **other.sources}  # in order of first use
        zero = (0, 0)
        pairs = {name: (self.sources.get(name, zero), other.sources.get(name, zero)) for name in names}
        return EngineStats(**added, sources={name: (a[0] + b[0], a[1] + b[1]) for name, (a, b) in pairs.items()})


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of a batch, repeated `group_size` times in a row by the trainer."""

    example_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int | None = None
    """Cap of this row's response, such as what is left of a conversation; None: that of the config."""

    def __post_init__(self):
        check_example_id(self.example_id)


@dataclass(slots=True)
class RolloutBatch:
    """The result of one rollout stage: completions in the order of the rows, and their cost."""

    completions: list[Completion]
    sample_indices: list[int]
    keys: list[int]
    ages: list[int | None]
    """Trainer steps since the stored trajectory was generated, None for rows without one."""
    replayed: list[bool]
    """True where the row kept its noise key from its last visit."""
    visits: list[int] = field(default_factory=list)
    """How often the row's prompt was rolled out before; empty for plain decoding by given keys."""
    unchanged: list[bool] = field(default_factory=list)
    """True where the response is the stored one, token for token; empty when nothing was looked up."""
    ahead: list[AheadText | None] = field(default_factory=list)
    """What was rolled out ahead of each row; empty if nothing was."""
    twin: list[bool | None] = field(default_factory=list)
    """Whether the response is the twin run's under the same key, token for token; None for rows that it does not have;
    empty without a twin."""
    stats: EngineStats = field(default_factory=EngineStats)
    ahead_s: float = 0.0
    """Worker seconds that went into `ahead`, before this stage began."""
    lookup_s: float = 0.0
    """Cache look-up, keys and draft preparation."""
    store_s: float = 0.0
    total_s: float = 0.0
    """Wall clock of the whole stage: look-up, generation and store."""
    calls: list[int] = field(default_factory=list)
    """Rows of each call of the engine, one after the other; empty: all rows in one call."""

    def __add__(self, later: RolloutBatch) -> RolloutBatch:
        """Both batches, the second rolled out after the first; costs add up."""
        added = {f.name: getattr(self, f.name) + getattr(later, f.name) for f in fields(self) if f.name != "calls"}
        calls = [*(self.calls or [len(self.keys)]), *(later.calls or [len(later.keys)])]
        return RolloutBatch(**added, calls=calls)

    def select(self, rows: Sequence[int]) -> RolloutBatch:
        """Some of the rows, in the given order, without the cost of the batch."""
        columns = ("completions", "sample_indices", "keys", "ages", "replayed", "visits", "unchanged", "ahead", "twin")
        selected: dict[str, Any] = {}
        for name in columns:
            column = getattr(self, name)
            selected[name] = [column[row] for row in rows] if column else []
        return RolloutBatch(**selected)

    @contextmanager
    def charge_store(self) -> Iterator[None]:
        """Counts the time of the block as storing."""
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        self.store_s += spent
        self.total_s += spent
