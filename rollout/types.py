"""The records that travel between cache, drafters, engines and trainers. Token ids only; text stays at the edges."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]


class RolloutError(RuntimeError):
    """A rollout could not be produced or trusted. The message names what, why, the value given and the remedy."""


class CacheError(RolloutError):
    """A trajectory cache cannot be used: written by another model, by a newer version, or not accessible."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished response of one slot, as stored for the next epoch.

    Example: Trajectory(tokens=(52, 17, 1), key=0x1f2e..., finish="stop", version=12, step=12, reward=1.0)
    """

    tokens: tuple[int, ...]
    """Response token ids, the EOS included when `finish == "stop"`."""
    key: int
    """The 64-bit noise key that drew it (signed)."""
    finish: FinishReason
    """`stop`: ended by an EOS id. `length`: cut by the cap; a longer cap continues it."""
    version: int
    """Weight version that produced the last token."""
    step: int
    """Trainer step that produced it."""
    reward: float | None = None
    """Total reward, None while unknown or when the reward failed."""
    logprobs: tuple[float, ...] | None = None
    """Behaviour log-prob of each token, stored for `lenient` only."""


class Drafter(Protocol):
    """Guesses a row's next tokens. Guesses decide how many tokens ride one pass, never which token is emitted."""

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """At most `limit` ids that may follow the response `tokens` emitted so far; empty when there is no guess."""


@dataclass(slots=True)
class Request:
    """What an engine needs to produce one response."""

    prompt: Sequence[int]
    key: int
    """Noise key: the token at response position t is drawn with the noise of (key, t)."""
    max_new_tokens: int
    drafter: Drafter | None = None
    """None decodes plainly."""
    draft_logprobs: Sequence[float] | None = None
    """Behaviour log-probs of the drafter's first proposal; needed by the `lenient` rule, ignored by `exact`."""
    draft_version: int | None = None
    """Weight version that drew the first proposal; provenance of what the `lenient` rule reuses."""
    expected_tokens: int | None = None
    """Guess of the tokens still to be decoded, for spreading rows over workers; None knows nothing."""


@dataclass(slots=True)
class Completion:
    """One response, with everything the trainer and the accounting need. All sequences have the response's length."""

    tokens: list[int]
    logprobs: list[float]
    """Log-prob of each token under the weights `version`, after temperature, top-k and top-p."""
    behaviour_logprobs: list[float]
    """Log-prob under the policy that produced the token: the stored one for tokens the lenient rule reused, else as in
    `logprobs`. It stands in for the lenient rule's own law, which needs whole distributions (docs/guarantees.md)."""
    reused: list[bool]
    """True where the token came from a draft, False where it was decoded."""
    finish: FinishReason
    version: int
    passes: int
    """Forward passes this row took part in (the prompt prefill excluded)."""
    draft_version: int | None = None
    """Weight version whose law drew the reused tokens where that is not `version` (the lenient rule), else None."""
    failure: str = ""
    """Why this row has no response (its sequences are then empty); such rows are masked and counted, never scored."""

    @property
    def versions(self) -> list[int]:
        """Weight version whose law drew each token. Under `exact` a reused token is the current version's own draw."""
        old = self.version if self.draft_version is None else self.draft_version
        return [old if reused else self.version for reused in self.reused]


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
    passes: int = 0
    forward_tokens: int = 0
    """Tokens pushed through the model, rejected ones and prompts included."""
    drafted: int = 0
    accepted: int = 0
    model_drafted: int = 0
    """Of `drafted`, what a draft model drew."""
    model_accepted: int = 0
    route_s: float = 0.0
    """Asking the router."""
    steps: int = 0
    """Reasoning steps, when a router decides who writes them."""
    escalated: int = 0
    """Of `steps`, those the policy wrote."""
    route_faults: int = 0
    """Of `escalated`, those for which the router failed or the draft step was none."""
    ties: int = 0
    """Draws closer than `tie_margin` that were decided by a canonical forward pass."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of a batch, repeated `group_size` times in a row by the trainer."""

    example_id: str
    prompt: tuple[int, ...]


@dataclass(slots=True)
class RolloutBatch:
    """The result of one rollout stage: completions in the order of the rows, and what they cost."""

    completions: list[Completion]
    slots: list[int]
    keys: list[int]
    ages: list[int | None]
    """Trainer steps since the draft was written, None for rows without a stored trajectory."""
    replayed: list[bool]
    """True where the row kept its noise key from its last visit."""
    unchanged: list[bool] = field(default_factory=list)
    """True where the response is the stored one, token for token; empty when nothing was looked up."""
    stats: EngineStats = field(default_factory=EngineStats)
    lookup_s: float = 0.0
    """Cache look-up, keys and draft preparation."""
    store_s: float = 0.0
    total_s: float = 0.0
    """Wall clock of the whole stage: look-up, generation and store."""

    @contextmanager
    def charge_store(self) -> Iterator[None]:
        """Times what runs inside as storing."""
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        self.store_s += spent
        self.total_s += spent
