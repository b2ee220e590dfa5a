"""What the engines share: a response in the making, and what a request must fulfil."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.budget import State
from rollout.engines.base import Speculation
from rollout.types import Completion, Request, RolloutError
from rollout.verify import cut

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
    passes: int = 0
    drafting: bool = True
    state: State = "start"
    guess: list[int] = field(default_factory=list)
    """What its own drafter expects next, carried or not."""
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

    def emit(self, tokens: list[int], logprobs: list[float], behaviour: list[float], accepted: int, eos_ids) -> int:
        """Appends up to the first EOS or the cap; the first `accepted` tokens are the draft's. Returns the count."""
        count, self.finish = cut(tokens, eos_ids, self.room)
        self.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        self.behaviour += behaviour[:count]
        self.reused += [i < accepted for i in range(count)]
        self.passes += 1
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
            draft_version=self.request.draft_version if rule == "lenient" else None,
            rejected=self.rejected,
        )


def check_request(request: Request, vocab: int, context: int, speculation: Speculation) -> None:
    """Raises RolloutError for a request that the engine cannot serve.

    Args: vocab: ids below it exist; context: most tokens of a prompt with its response.
    """
    prompt, cap = request.prompt, request.max_new_tokens
    if not prompt:
        raise RolloutError("a prompt has no tokens; a rollout needs at least one")
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        bad = next(t for t in prompt if not 0 <= t < vocab)
        raise RolloutError(f"a prompt holds the token id {bad}, outside the model's 0..{vocab - 1}")
    if cap < 1:
        raise RolloutError(f"max_new_tokens={cap} leaves no room for a response; use at least 1")
    if len(prompt) >= context:
        raise RolloutError(
            f"a prompt of {len(prompt)} tokens leaves no room for a response in the model's context of {context}; "
            f"use a shorter prompt, of at most {context - 1} tokens"
        )
    if cap > context - len(prompt):
        raise RolloutError(
            f"a prompt of {len(prompt)} tokens plus max_new_tokens={cap} exceeds the model's context of {context}. "
            f"Use rollout.max_new_tokens={context - len(prompt)} or less"
        )
    if speculation.rule == "lenient" and request.drafter and request.draft_logprobs is None:
        raise RolloutError("the lenient rule needs the stored log-probs of every draft; the cache holds none")
